# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Programs of the steps that send, without a conditional, and of those that do not."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.contrib.slow_links import CO2Config, StreamingConfig, exchange
from jaxmoe.contrib.slow_links.exchange import About, mean, permuted_mean
from jaxmoe.contrib.slow_links.timing import ExchangeTiming
from jaxmoe.contrib.slow_links.workers.programs import ScheduledPrograms, WorkerSchedule
from jaxmoe.contrib.slow_links.workers.state import WorkerTraining
from jaxmoe.contrib.slow_links.workers.step import exchange_late, exchange_now, local_steps
from jaxmoe.execution import ExecutionConfig
from jaxmoe.planning.hlo import collectives
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import TrainState, state_around
from jaxmoe.training.step import Step
from sharding import MeshConfig, make_mesh
from sharding import axes as ax
from tests.jaxmoe.contrib.slow_links.workers.test_steps import Trained
from tests.support import one_step
from tests.support.meshes import mesh_of
from tests.support.models import TINY


@pytest.mark.parametrize(
    ("timing", "turns"),
    [
        (ExchangeTiming(every=4, delay=4, last=20), ((), (0,))),
        (ExchangeTiming(every=4, fragments=2, delay=1, last=20), ((), (0,), (1,))),
        (ExchangeTiming(every=1, delay=1), ((), (0,))),
        (ExchangeTiming(every=50, delay=1, last=20), ((),)),  # nothing is sent before the last step
    ],
)
def test_a_run_has_a_program_for_each_fragment_and_one_that_sends_nothing(timing, turns):
    assert timing.turns == turns
    steps = 100 if timing.last is None else timing.last
    assert {timing.sent(step) for step in range(steps)} == set(turns)


def test_compiled_programs_of_several_turns_need_what_the_largest_does():
    """A run asks its compiled step, as any program of JAX."""

    def products(array, number):
        return sum(array @ jnp.sin(array * factor) for factor in range(number))

    array = jnp.ones((64, 64))
    jitted = jax.jit(products, static_argnums=1)
    compiled = {number: jitted.lower(array, number).compile() for number in (1, 3)}
    programs = ScheduledPrograms(schedule=WorkerSchedule(lambda step: 1, (1, 3)), compiled=compiled)
    largest = compiled[3].memory_analysis().temp_size_in_bytes
    assert programs.memory_analysis().temp_size_in_bytes == largest > 0


class Number:
    """A step number on the device, which counts how often the host reads it."""

    reads = 0

    def __init__(self, value: int):
        self.value = value

    def __int__(self):
        Number.reads += 1
        return self.value


def test_the_host_reads_the_step_of_a_state_that_it_has_not_made_itself():
    """Once at the start, and once after a rollback: the host does not wait for the steps."""
    taken, batch = [], one_step.batch()

    def program(turn) -> Any:
        def run(state, batch):
            del batch
            taken.append((state.step.value, turn))
            return dataclasses.replace(state, step=Number(state.step.value + 1)), None

        return run

    schedule = WorkerSchedule(lambda step: step % 3 == 0, (False, True))
    empty: Any = dict.fromkeys(
        ("params", "opt_state", "router_state", "rng", "skipped", "skipped_in_a_row")
    )
    number: Any = Number(5)
    Number.reads = 0
    state = first = TrainState(step=number, **empty)
    for _ in range(5):
        state, _ = schedule.run(program, state, batch)
    assert Number.reads == 1
    state, _ = schedule.run(program, first, batch)
    state, _ = schedule.run(program, state, batch)
    assert Number.reads == 2
    steps = [5, 6, 7, 8, 9, 5, 6]
    assert taken == [(step, step % 3 == 0) for step in steps]


def _conditional(training):
    """The step as one program, which asks the state what to send: the reference."""
    timing, step = training.method.timing, training.step

    def branch(turn):
        return lambda state: exchange_late(training, state, turn)

    def run(state, batch):
        index = jnp.int32(0)
        for number, turn in enumerate(timing.turns):
            for part in turn:
                index = jnp.where(timing.sends(part, state.step), number, index)
        state = jax.lax.switch(index, [branch(turn) for turn in timing.turns], state)
        state, metrics = local_steps(step, training, state, batch)
        return exchange_now(training, state), metrics

    return jax.jit(run)


def _collectives(jaxpr: Any, is_conditional: bool = False) -> Iterator[bool]:
    """Yield for each collective of a traced program whether it lies in a conditional."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith(("psum", "ppermute", "all_gather", "all_to_all", "reduce_scatter")):
            yield is_conditional
        for inner in jaxprs_in_params(equation.params):
            yield from _collectives(inner, is_conditional or name == "cond")


@pytest.mark.parametrize(
    "config", [StreamingConfig(every=4, fragments=2), CO2Config(every=2)], ids=lambda c: c.name
)
def test_what_a_step_sends_lies_in_no_conditional(config):
    """A compiler cannot run products beside a collective that may not run at all."""
    execution = ExecutionConfig(mesh=MeshConfig(replica=2, data=2))
    step = Step(model=TINY, optimizer=optax.sgd(0.1), execution=execution)
    table = parameter_table(TINY, None, execution.axis_rules)
    training = WorkerTraining.of(config, table, step, steps=100)
    mesh = mesh_of(execution)
    with jax.set_mesh(mesh):
        params = jax.device_put(
            one_step.params_of(TINY), table.tree(lambda row: NamedSharding(mesh, row.spec))
        )
        key = jax.random.key(0)
        state = jax.eval_shape(
            lambda x: training.begin(state_around(TINY, step.optimizer, execution, x, key)), params
        )
        for turn in training.method.timing.turns:
            late = jax.make_jaxpr(partial(exchange_late, training, sent=turn))(state)
            found = list(_collectives(late.jaxpr))
            assert bool(found) == bool(turn) and not any(found)


@pytest.mark.parametrize("shape", [(8, 5), (6, 5), (3,)])
def test_a_mean_by_permutes_is_bitwise_that_of_an_all_reduce(shape, monkeypatch):
    monkeypatch.setattr(exchange, "platform", lambda: "tpu")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, *shape)), jnp.float32)
    results = {}
    with jax.set_mesh(make_mesh(MeshConfig(replica=4, data=2))):
        for name, way in {"all-reduce": mean(), "permutes": permuted_mean()}.items():

            def mix(x, way=way):
                key, number = jax.random.key(0), jnp.int32(0)
                about = About(number, key, ax.REPLICA, 4, (), (), True, is_beside=True)
                return way.mix(x[0], lambda payload, _: payload, x[0], about, ())[0][None]

            spec = PartitionSpec(ax.REPLICA)
            mapped = jax.shard_map(mix, in_specs=spec, out_specs=spec, check_vma=False)
            compiled: Any = jax.jit(mapped).lower(jax.reshard(x, spec)).compile()
            rows = {row.kind: row.wire_bytes for row in collectives(compiled.as_text())}
            results[name] = np.asarray(compiled(jax.reshard(x, spec)))
            assert rows.keys() == {"all-reduce" if name == "all-reduce" else "collective-permute"}
    np.testing.assert_array_equal(results["permutes"], results["all-reduce"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [StreamingConfig(every=4, fragments=2), CO2Config(every=2)], ids=lambda c: c.name
)
def test_programs_of_turns_equal_one_program_with_conditionals(config):
    """From the first step to the last, after which all is exchanged."""
    trained = Trained(MeshConfig(replica=2, data=2), config=config, last=9)
    conditional = _conditional(trained.training)
    state, _ = trained.steps(trained.state, 9)
    wanted = trained.state
    with trained.current():
        for _ in range(9):
            wanted, _ = conditional(wanted, trained.rows(one_step.batch()))
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            continue
        # The programs are compiled apart, and may round apart.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
