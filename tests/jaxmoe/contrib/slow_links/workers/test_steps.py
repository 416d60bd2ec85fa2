# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Steps of workers with a model: equal to separate runs with the outer step by hand."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.slow_links import DiLoCoConfig, SpesConfig
from jaxmoe.contrib.slow_links.workers.local import local_of
from jaxmoe.contrib.slow_links.workers.state import WorkerTraining
from jaxmoe.contrib.slow_links.workers.step import make_worker_step
from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.optim import adamw, muon
from jaxmoe.routing import METHODS
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.metrics import fetch_metrics
from jaxmoe.training.state import state_around
from jaxmoe.training.step import Step
from sharding import MeshConfig, make_mesh
from sharding import axes as ax
from sharding.distributed import global_batch
from sharding.expert_parallel import AllToAllConfig
from tests.support import one_step
from tests.support.models import BATCH, MOE, TINY

WORKERS, EVERY, STEPS = 2, 2, 3
ADAM = adamw(1e-2)
OUTER = optax.sgd(0.7, 0.9, nesterov=True)
CONFIG = DiLoCoConfig(every=EVERY, workers=WORKERS)
KEY = jax.random.key(0)


def _kinds(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim >= 2 else "vector", params)


OPTIMIZERS = {
    "adam": ADAM,
    "muon": optax.partition({"matrix": muon(0.02, matrix_axes=(-2, -1)), "vector": ADAM}, _kinds),
}


def _part(rows, worker):
    size = BATCH // WORKERS
    return jax.tree.map(lambda x: x[worker * size : (worker + 1) * size], rows)


@functools.cache
def _by_hand(name):
    """Slow and own parameters after separate runs on one device, the outer step between them."""
    rows, inner = one_step.batch(), OPTIMIZERS[name]
    step = Step(model=TINY, optimizer=inner)
    params = one_step.params_of(TINY)
    jitted = jax.jit(lambda state, rows, first: step(state, rows, first)[0])
    slow, outer = params, OUTER.init(params)
    states = [
        state_around(TINY, inner, ExecutionConfig(), jax.tree.map(jnp.array, params), KEY)
        for _ in range(WORKERS)
    ]
    for number in range(STEPS):
        for worker, state in enumerate(states):
            first = jnp.int32(worker * BATCH // WORKERS)
            states[worker] = jitted(state, _part(rows, worker), first)
        if (number + 1) % EVERY == 0:
            own = [state.params for state in states]
            delta = jax.tree.map(lambda s, *w: s - sum(w) / WORKERS, slow, *own)
            updates, outer = OUTER.update(delta, outer, slow)
            slow = optax.apply_updates(slow, updates)
            states = [dataclasses.replace(state, params=slow) for state in states]
    return slow, [state.params for state in states]


class Trained:
    """Workers on a mesh, compiled once."""

    def __init__(
        self,
        mesh=None,
        inner=ADAM,
        config=CONFIG,
        model=TINY,
        rows=None,
        clip=1.0,
        last=100,
        **fields,
    ):
        execution = ExecutionConfig(mesh=mesh or MeshConfig(), **fields)
        step = Step(model=model, optimizer=inner, execution=execution, clip=clip)
        table = parameter_table(model, None, execution.axis_rules)
        self.training = WorkerTraining.of(config, table, step, steps=last)
        rows = one_step.batch() if rows is None else rows
        size = math.prod(execution.mesh.sizes)
        self.mesh = make_mesh(execution.mesh, jax.devices()[:size]) if size > 1 else None
        params = one_step.params_of(model)
        with self.current():
            if (mesh := self.mesh) is not None:
                where = table.tree(lambda row: jax.NamedSharding(mesh, row.spec))
                params = jax.device_put(params, where)
            state = state_around(model, inner, execution, jax.tree.map(jnp.array, params), KEY)
            self.state = jax.jit(self.training.begin)(state)
            jitted = make_worker_step(self.training)
            self.compiled = jitted.lower(self.state, self.rows(rows)).compile()

    def current(self):
        return (
            jax.set_mesh(self.mesh) if self.mesh is not None else jax.numpy_rank_promotion("raise")
        )

    def rows(self, rows):
        return rows if self.mesh is None else global_batch(rows, self.mesh)

    def steps(self, state, number=STEPS, rows=None):
        metrics = []
        with self.current():
            for _ in range(number):
                state = jax.tree.map(jnp.copy, state)
                given = self.rows(one_step.batch() if rows is None else rows)
                state, metric = self.compiled(state, given)
                metrics += fetch_metrics([metric])
        return state, metrics


SPES = SpesConfig(every=EVERY, merging=0.0, workers=WORKERS)


def _sizes(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def test_workers_begin_with_the_moments_of_their_own_experts():
    """Half of them each; without workers there would be all, twice."""
    step = Step(model=TINY, optimizer=ADAM, execution=ExecutionConfig())
    training = WorkerTraining.of(SPES, parameter_table(TINY), step, steps=100)
    params = one_step.params_of(TINY)
    state = jax.eval_shape(
        lambda params: training.begin(state_around(TINY, ADAM, ExecutionConfig(), params, KEY)),
        params,
    )
    experts = [leaf.shape for leaf in training.leaves.values() if ax.EXPERTS in leaf.axes]
    whole, foreign = _sizes(jax.eval_shape(ADAM.init, params)), sum(map(math.prod, experts)) // 2
    assert foreign > 0
    assert _sizes(local_of(state).opt_state) == WORKERS * (whole - 2 * foreign)


@pytest.mark.slow
@pytest.mark.parametrize("inner", OPTIMIZERS)
@pytest.mark.parametrize(
    "mesh",
    [None, MeshConfig(replica=2, data=2), MeshConfig(replica=2, expert=2)],
    ids=("one", "data", "expert"),
)
def test_own_moments_make_the_steps_that_all_moments_make(inner, mesh, monkeypatch):
    """Also where a worker's devices have half of the experts each: these keep all moments."""
    few = Trained(mesh, config=SPES, inner=OPTIMIZERS[inner])
    monkeypatch.setattr(WorkerTraining, "own_rows", None)
    whole = Trained(mesh, config=SPES, inner=OPTIMIZERS[inner])
    is_cut = mesh is not None and mesh.expert > 1
    held = [_sizes(local_of(one.state).opt_state) for one in (few, whole)]
    assert held[0] == held[1] if is_cut else held[0] < held[1]
    after, wanted = (one.steps(one.state)[0] for one in (few, whole))
    pairs = ((after.params, wanted.params), (local_of(after).params, local_of(wanted).params))
    for mine, theirs in pairs:
        for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def _check(trained, name="adam"):
    state, metrics = trained.steps(trained.state)
    slow, own = _by_hand(name)
    for wanted, got in zip(jax.tree.leaves(slow), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    for worker, params in enumerate(own):
        mine = jax.tree.leaves(local_of(state).params)
        for wanted, got in zip(jax.tree.leaves(params), mine, strict=True):
            np.testing.assert_allclose(np.asarray(got)[worker], wanted, atol=1e-5)
    assert all(np.isfinite(metric.loss) for metric in metrics)
    return state, metrics


def test_workers_on_one_device_equal_separate_runs():
    _check(Trained())


@pytest.mark.slow
def test_workers_on_a_mesh_equal_separate_runs_and_are_silent_between():
    trained = Trained(MeshConfig(replica=2))
    state, metrics = _check(trained)
    assert metrics[0].exchange["spread"] == 0.0 and metrics[1].exchange["spread"] > 0.0
    # Collectives between workers stand in the branch of the exchange, and nowhere else.
    text = trained.compiled.as_text()
    entry = text[text.index("\nENTRY ") :]
    entry = entry[: entry.index("\n}")]
    between = r" (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)\(.*\{0,1\}"
    assert re.search(between, text) and not re.search(between, entry)
    # A worker whose rows are broken refuses its step alone.
    rows = one_step.batch()
    weights = np.where(np.arange(BATCH)[:, None] < BATCH // 2, rows.loss_weights, np.nan)
    broken = dataclasses.replace(rows, loss_weights=weights.astype(np.float32))
    after, (metric,) = trained.steps(state, 1, broken)
    assert metric.exchange["refused"] == 1 and not metric.is_skipped
    assert np.isfinite(metric.loss)
    assert list(np.asarray(local_of(after).skipped)) == [0, 1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.params))


MORE = {
    "expert": lambda: Trained(MeshConfig(replica=2, data=2, expert=2), dispatcher=AllToAllConfig()),
    "tensor": lambda: Trained(MeshConfig(replica=2, data=2, tensor=2), rules="zero2"),
    "data_of_all_workers": lambda: Trained(MeshConfig(data=2)),
    "remat": lambda: Trained(MeshConfig(replica=2, expert=2), remat="full", rules="zero1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", MORE)
def test_workers_on_more_meshes_equal_separate_runs(row):
    _check(MORE[row]())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(replica=2)])
def test_weights_count_the_tokens_of_accepted_steps_since_the_exchange(mesh):
    config = dataclasses.replace(CONFIG, weights="tokens")
    trained = Trained(mesh, config=config)
    rows = one_step.batch()
    tokens = [float(np.sum(_part(rows, worker).loss_weights)) for worker in range(WORKERS)]
    state, _ = trained.steps(trained.state, 1)
    np.testing.assert_allclose(local_of(state).talks[0].weighting, tokens, rtol=1e-6)
    weights = np.where(np.arange(BATCH)[:, None] < BATCH // 2, rows.loss_weights, np.nan)
    broken = dataclasses.replace(rows, loss_weights=weights.astype(np.float32))
    state, _ = trained.steps(state, 1, broken)
    assert list(np.asarray(local_of(state).talks[0].weighting)) == [0.0, 0.0]
    state, _ = trained.steps(state, 1, broken)
    np.testing.assert_allclose(local_of(state).talks[0].weighting, [tokens[0], 0.0], rtol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


@pytest.mark.slow
def test_whole_matrices_of_muon_stay_those_of_a_worker():
    _check(Trained(MeshConfig(replica=2, data=2), OPTIMIZERS["muon"]), "muon")


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_router_state_of_a_round_is_that_of_the_summed_statistics(every):
    """Rounds of one step; and of two in a run of three, which ends with one of one step."""
    moe = dataclasses.replace(MOE, **METHODS["loss_free"].parts())
    model = dataclasses.replace(TINY, moe=moe)
    config = DiLoCoConfig(every=every, workers=2, learning_rate=1.0, momentum=0.0)
    inner = optax.sgd(0.1 if every == 1 else 0.0)  # of several steps, workers would lie apart
    rows = dataclasses.replace(one_step.batch(), segment_ids=None)
    rows = dataclasses.replace(rows, loss_weights=np.ones_like(rows.loss_weights))
    trained = Trained(config=config, model=model, inner=inner, rows=rows, clip=None, last=STEPS)
    state, _ = trained.steps(trained.state, rows=rows)
    alone = Step(model=model, optimizer=inner, clip=None).jit_step()
    wanted = state_around(model, inner, ExecutionConfig(), one_step.params_of(model), KEY)
    wanted = jax.tree.map(jnp.array, wanted)
    for _ in range(STEPS):
        wanted, _ = alone(wanted, rows)
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(wanted.router_state))
    for one, other in zip(
        jax.tree.leaves(wanted.router_state), jax.tree.leaves(state.router_state), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "config", "fields", "message"),
    [
        (MeshConfig(), DiLoCoConfig(), {}, "must be at least 2, and is 1"),
        (MeshConfig(replica=2), DiLoCoConfig(workers=4), {}, "must be replicas.workers=4, or 1"),
        (MeshConfig(replica=2, stage=2), DiLoCoConfig(), {}, "cannot be a pipeline yet"),
        (MeshConfig(replica=2), DiLoCoConfig(), {"rules": "hybrid"}, "shares the state of all"),
        (MeshConfig(replica=2), DiLoCoConfig(), {"offload": OffloadConfig()}, "stay on their"),
    ],
)
def test_meshes_that_do_not_fit_the_workers_are_refused(mesh, config, fields, message):
    step = Step(model=TINY, optimizer=ADAM, execution=ExecutionConfig(mesh=mesh, **fields))
    with pytest.raises(ValueError, match=message):
        WorkerTraining.of(config, parameter_table(TINY), step, steps=100)
