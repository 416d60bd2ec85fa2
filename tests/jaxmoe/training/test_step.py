# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The training step: descent, accumulation, clipping, donation, the guard, router state, meshes.

One compiled step serves most tests. A fault to be injected is written in the words of the state's
random key, which no router here reads (tests/support/faults.py). What a fault may do to a state:
tests/faults/test_bad_steps.py.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.routing import SoftmaxTopKConfig
from jaxmoe.routing.routers.token_choice.token_choice import TokenChoice
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.accumulation import GradientSums, accumulate
from jaxmoe.training.guard import FEWEST, no_norms
from jaxmoe.training.state import TrainState, init_state
from jaxmoe.training.step import make_train_step
from sharding.distributed import global_batch
from tests.support.faults import fault_key, faulty_step
from tests.support.meshes import mesh_named
from tests.support.tolerances import assert_close

ROWS, LENGTH, VOCAB = 8, 12, 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CountingConfig(SoftmaxTopKConfig):
    """A router that remembers its updates and the load of each expert."""

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> "Counting":
        return Counting(self, num_experts, top_k, embed_dim)


@dataclasses.dataclass(frozen=True)
class Counting(TokenChoice):
    def init(self, key):
        params, _ = super().init(key)
        loads = jnp.zeros((self.num_experts,), jnp.float32)
        return params, {"loads": loads, "updates": jnp.zeros((), jnp.int32)}

    def update(self, state, statistics, step):
        assert statistics.counts.shape == (self.num_experts,)  # one layer at a time
        return {"loads": state["loads"] + statistics.counts, "updates": state["updates"] + 1}


MODEL = ModelConfig(
    vocab_size=VOCAB,
    num_layers=2,
    embed_dim=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8, router=CountingConfig()),
)
DENSE = dataclasses.replace(MODEL, num_layers=1, moe=None, dense_dim=16)
# A large epsilon keeps Adam's division from blowing rounding up.
OPTIMIZER = AdamWConfig(learning_rate=0.1, epsilon=1e-2).build(
    parameter_table(MODEL), LinearConfig(floor=1.0).build(1000)
)
SGD = optax.sgd(1.0)


def _batch(loss_weights=None) -> Batch:
    """Rows of very different weight, one of them mostly padding."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    segment_ids = np.ones((ROWS, LENGTH), np.int32)
    segment_ids[1, 3:] = 0
    weights = (segment_ids != 0) * np.linspace(0.2, 2, ROWS)[:, None]
    return Batch(
        tokens=rows[:, :-1],
        targets=rows[:, 1:],
        loss_weights=(weights if loss_weights is None else loss_weights).astype(np.float32),
        segment_ids=segment_ids,
        positions=np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    )


BATCH = _batch()
NUM_REAL = int((BATCH.segment_ids != 0).sum())


def _state(model=MODEL, optimizer=OPTIMIZER, fault: str = "none", at: int = 0) -> TrainState:
    """A state of random numbers; values from numpy, because compiling `init_state` takes longer."""
    rng = np.random.default_rng(1)

    def value(row):
        noise = row.init_std * rng.standard_normal(row.shape)
        return jnp.asarray(noise + (row.declaration.init == "ones"), jnp.float32)

    params = parameter_table(model).tree(value)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        router_state=initial_router_state(model),
        rng=fault_key(fault, at),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )


@pytest.fixture(scope="module")
def step():
    """The step of MODEL, with faults."""
    return faulty_step(make_train_step(MODEL, OPTIMIZER), _state(), BATCH)


@functools.cache
def dense_step(accumulation=1, clip=None):
    """Return the metrics of one step of DENSE under SGD, and the parameters before and after."""
    state = _state(DENSE, SGD)
    before = jax.tree.map(np.array, state.params)
    step = make_train_step(DENSE, SGD, accumulation=accumulation, clip=clip)
    state, metrics = step(state, BATCH)
    assert state.router_state == {}
    return metrics, before, jax.tree.map(np.asarray, state.params)


def _kept(state: TrainState):
    """What the guard protects, copied to the host: the step donates the state."""
    return jax.tree.map(np.array, (state.params, state.opt_state, state.router_state))


def _gradients(state: TrainState):
    """Ten times Adam's first moment: after one step the clipped gradient."""
    return jax.tree.map(lambda moment: 10 * np.asarray(moment), state.opt_state[0].mu)


def _assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_the_loss_decreases(step):
    state, losses = _state(), []
    for _ in range(40):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics.loss))
    assert losses[0] == pytest.approx(math.log(VOCAB), rel=0.2)
    assert losses[-1] < 0.3 * losses[0]
    assert state.step == 40 and state.skipped == 0 and state.opt_state[0].count == 40
    assert metrics.num_tokens == pytest.approx(BATCH.loss_weights.sum())
    np.testing.assert_array_equal(jax.random.key_data(state.rng), [0, 0])


def test_routers_are_updated_once_per_step_and_layer(step):
    """With the statistics of the whole batch, of which padding is no part."""
    state, loads = _state(), 0.0
    assert state.router_state["loads"].shape == (2, 4)
    for number in range(1, 4):
        state, metrics = step(state, BATCH)
        loads = loads + np.asarray(metrics.load) * NUM_REAL * MODEL.moe.top_k
        np.testing.assert_array_equal(state.router_state["updates"], [number] * 2)
        np.testing.assert_allclose(state.router_state["loads"], loads, rtol=1e-6)
    assert (loads[0] != loads[1]).any()


def test_the_state_is_donated(step):
    state = _state()
    step(state, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.router_state))


def test_a_fault_costs_one_step_and_nothing_else(step):
    """The run goes on as if that step had not been: the optimiser has counted one step less."""
    faulty, clean = _state(fault="nan", at=2), _state()
    for number in range(5):
        faulty, _ = step(faulty, BATCH)
        if number != 2:
            clean, _ = step(clean, BATCH)
    _assert_same(_kept(faulty), _kept(clean))


def test_a_new_state_that_is_not_finite_is_refused():
    """Finite loss and gradients, and an update that is not."""
    optimizer = optax.sgd(math.inf)
    state = _state(DENSE, optimizer)
    before = _kept(state)
    state, metrics = make_train_step(DENSE, optimizer)(state, BATCH)
    assert metrics.is_skipped and np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm)
    _assert_same(_kept(state), before)


def test_steps_refused_in_a_row_are_counted(step):
    weights = BATCH.loss_weights.copy()
    weights[0, 0] = math.nan
    bad, state = _batch(weights), _state()
    state, _ = step(state, BATCH)
    before = _kept(state)
    for in_a_row in range(1, 6):
        state, metrics = step(state, bad)
        assert metrics.is_skipped and np.isnan(metrics.loss)
        assert metrics.skipped_in_a_row == state.skipped_in_a_row == in_a_row
    _assert_same(_kept(state), before)
    state, metrics = step(state, BATCH)
    assert (int(state.step), int(state.skipped), int(metrics.skipped_in_a_row)) == (7, 5, 0)


def test_a_batch_without_weight_is_no_fault(step):
    state, metrics = step(_state(), _batch(np.zeros((ROWS, LENGTH))))
    assert metrics.loss == 0.0 and not metrics.is_skipped and metrics.num_tokens == 0.0


def test_norms_of_balance_losses_alone_set_no_bound():
    """Batches without weight have small norms, under which every other step would be refused."""
    model = dataclasses.replace(MODEL, num_layers=1)
    state = dataclasses.replace(_state(model, SGD), recent_norms=no_norms())
    step = make_train_step(model, SGD, max_norm_ratio=10.0)
    for _ in range(FEWEST):
        state, metrics = step(state, _batch(np.zeros((ROWS, LENGTH))))
        assert 0.0 < metrics.judged_norm < 0.1 and not metrics.is_skipped
    np.testing.assert_array_equal(state.recent_norms, no_norms())
    state, metrics = step(state, BATCH)
    assert metrics.judged_norm > 0.2 and not metrics.is_skipped
    assert state.recent_norms[-1] == metrics.judged_norm


@pytest.mark.slow
def test_accumulation_is_the_whole_batch(step):
    """Balance losses included: here they are the same in every micro-batch, rows i and i + 4."""
    batch = jax.tree.map(lambda rows: rows[[0, 0, 0, 0, 1, 1, 1, 1]], BATCH)
    state, metrics = make_train_step(MODEL, OPTIMIZER, accumulation=4)(_state(), batch)
    whole, wanted = step(_state(), batch)
    assert_close(metrics.loss, wanted.loss, kind="end_to_end")
    assert_close(metrics.losses, wanted.losses, kind="end_to_end")
    assert_close(metrics.grad_norm, wanted.grad_norm, kind="end_to_end")
    assert_close(_gradients(state), _gradients(whole), kind="end_to_end")
    assert optax.tree.norm(_gradients(state)) == pytest.approx(min(1, wanted.grad_norm), rel=1e-4)
    _assert_same(state.router_state, whole.router_state)
    _assert_same(metrics.load, wanted.load)


@pytest.mark.parametrize("accumulation", [2, pytest.param(8, marks=pytest.mark.large)])
def test_accumulation_weighs_tokens(accumulation):
    """Rows of unequal weight: the mean is over the whole batch, not over means of its parts."""
    assert_close(dense_step(accumulation)[2], dense_step()[2], kind="end_to_end")


def test_micro_batches_take_every_nth_row():
    """And a balancer's loss is weighed by a micro-batch's share."""
    seen = []

    def gradients_of(micro, share, others):
        seen.append(share)
        assert others is None
        tokens = micro.batch.tokens[jnp.argsort(micro.row_ids)]
        rows = jnp.zeros((ROWS, LENGTH), jnp.int32).at[: len(tokens)].set(tokens)
        zero = jnp.zeros((), jnp.float32)
        return GradientSums(grads={"rows": rows}, loss=zero, losses={}, statistics=None)

    batch = jax.tree.map(jnp.asarray, BATCH)
    total = accumulate(gradients_of, batch, 4, ExecutionConfig().placement).grads["rows"]
    np.testing.assert_array_equal(total[0], BATCH.tokens[:4].sum(0))
    np.testing.assert_array_equal(total[1], BATCH.tokens[4:].sum(0))
    assert set(seen) == {0.25}


def test_clipping():
    """By the global norm, and only from above."""
    moves = {}
    for clip in (None, 0.1, 1e6):
        metrics, before, after = dense_step(clip=clip)
        moves[clip] = jax.tree.map(np.subtract, after, before)
    norms = {clip: optax.tree.norm(move) for clip, move in moves.items()}
    assert norms[0.1] == pytest.approx(0.1, rel=1e-4)
    assert norms[None] == pytest.approx(float(metrics.grad_norm), rel=1e-4) and norms[None] > 0.2
    assert_close(moves[1e6], moves[None], kind="end_to_end")
    shrunk = jax.tree.map(lambda move: move * (0.1 / np.float32(norms[None])), moves[None])
    assert_close(moves[0.1], shrunk, kind="end_to_end")


def test_a_dense_model_reports_no_router():
    metrics, *_ = dense_step()
    assert metrics.router == {} and metrics.load is None and metrics.losses == {}


def test_bfloat16_parameters_keep_their_dtypes():
    execution = ExecutionConfig(precision=PrecisionPolicy(parameters="bfloat16"))
    table = parameter_table(DENSE)
    optimizer = AdamWConfig(learning_rate=0.5).build(table, LinearConfig().build(10))
    state = init_state(DENSE, optimizer, jax.random.key(0), execution=execution)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    state, metrics = make_train_step(DENSE, optimizer, execution=execution)(state, BATCH)
    assert not metrics.is_skipped
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == dtypes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulation": 0}, "accumulation=0 must be at least 1"),
        ({"clip": 0.0}, "clip=0.0 must be above 0, or None not to clip"),
        ({"clip": math.nan}, "clip=nan must be above 0, or None not to clip"),
    ],
)
def test_bad_options_are_refused(options, text):
    with pytest.raises(ValueError) as error:
        make_train_step(MODEL, OPTIMIZER, **options)
    assert str(error.value) == text


def test_accumulation_must_divide_the_batch():
    with pytest.raises(ValueError, match="accumulation=3 must divide the batch of 8 sequences"):
        make_train_step(DENSE, OPTIMIZER, accumulation=3)(_state(), BATCH)


# Meshes.


def _two_steps(step, mesh, execution):
    """The state after two steps, which keeps its layout, and what they reported."""
    state = init_state(MODEL, OPTIMIZER, jax.random.key(2), execution=execution, mesh=mesh)
    laid_out = jax.tree.map(lambda leaf: leaf.sharding, state)
    batch, history = BATCH if mesh is None else global_batch(BATCH, mesh), []
    for _ in range(2):
        state, metrics = step(state, batch)
        history.append(metrics)
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == laid_out
    return state, history


@pytest.fixture(scope="module")
def single(step):
    return _two_steps(step, None, ExecutionConfig())


@pytest.mark.parametrize(
    "rules", ["fully_sharded", pytest.param("data_parallel", marks=pytest.mark.slow)]
)
def test_eight_devices_equal_one(rules, single):
    mesh = mesh_named("data8")
    execution = ExecutionConfig(rules=rules)
    with jax.set_mesh(mesh):
        step = make_train_step(MODEL, OPTIMIZER, execution=execution)
        state, history = _two_steps(step, mesh, execution)
    wanted_state, wanted = single
    for metrics, wanted_metrics in zip(history, wanted, strict=True):
        assert_close(metrics.loss, wanted_metrics.loss, kind="end_to_end")
        assert_close(metrics.losses, wanted_metrics.losses, kind="end_to_end")
        assert_close(metrics.grad_norm, wanted_metrics.grad_norm, kind="end_to_end")
        assert_close(metrics.router, wanted_metrics.router, kind="end_to_end")
    assert_close(state.params, wanted_state.params, kind="end_to_end")
    assert_close(_gradients(state), _gradients(wanted_state), kind="end_to_end")
    _assert_same(state.router_state, wanted_state.router_state)
    words = [jax.random.key_data(key) for key in (state.rng, wanted_state.rng, jax.random.key(2))]
    np.testing.assert_array_equal(words[0], words[1])
    assert (words[1] != words[2]).any(), "the key of the initial values is not used again"

    specs = parameter_table(MODEL, rules=execution.axis_rules).tree(lambda row: row.spec)
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        assert jax.tree.map(lambda leaf: leaf.sharding.spec, tree) == specs
    experts = state.params["moe_blocks_0"]["moe"]["experts"]["gate_up"]
    shard = experts.addressable_shards[0].data.size
    assert experts.size == shard * (8 if rules == "fully_sharded" else 1)
