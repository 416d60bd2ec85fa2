# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Expert choice: against loops, its exact loads, its schedules, and scopes spread over devices."""

import dataclasses
import functools
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import MoEConfig
from jaxmoe.routing import (
    CapacityConfig,
    ExpertChoiceConfig,
    Extent,
    LoadBalanceConfig,
    RenormalizedGateConfig,
    RouterInputs,
    RouterZConfig,
    SoftmaxGateConfig,
    ZeroComputationConfig,
)
from jaxmoe.routing.routers.expert_choice.expert_choice import CapacitySchedule, scheduled_k
from tests.support.noncausal_models import gates_by_token, loss_on_mesh, loss_on_one_device
from tests.support.tolerances import assert_close

ROWS, LENGTH, WIDTH, EXPERTS, TOP_K = 8, 8, 5, 4, 3
SCHEDULES = typing.get_args(CapacitySchedule)
WEIGHTS = ("post", "probability", "sigmoid")
OTHER_PAIRS = [("post", "batch"), ("probability", "sequence"), ("sigmoid", "batch")]
PADDED = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 5 != 2
PADDED[3] = False  # a row of padding alone


def drawn(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    weight = rng.normal(size=(WIDTH, EXPERTS)).astype(np.float32)
    ratio = np.repeat(np.linspace(0.0, 1.0, ROWS, dtype=np.float32)[:, None], LENGTH, axis=1)
    return {"weight": jnp.asarray(weight)}, jnp.asarray(x), jnp.asarray(ratio)


def inputs_of(x, mask, ratio, extent):
    rows = x.shape[0] * x.shape[1]
    return RouterInputs(
        x=x.reshape(rows, -1),
        token_mask=mask.reshape(-1),
        segment_ids=mask.reshape(-1).astype(jnp.int32),
        context={"mask_ratio": ratio.reshape(-1)},
        extent=extent,
    )


def route(config, params, x, mask=PADDED, ratio=None, extent=None, top_k=TOP_K):
    """Return (RouterOutput, gates [T E])."""
    ratio = jnp.zeros(x.shape[:2], jnp.float32) if ratio is None else ratio
    extent = extent or Extent(sequence_length=x.shape[1])
    return _route(config, params, x, jnp.asarray(mask), ratio, extent, top_k)


@functools.partial(jax.jit, static_argnames=("config", "extent", "top_k"))
def _route(config, params, x, mask, ratio, extent, top_k):
    router = config.build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)
    inputs = inputs_of(x, mask, ratio, extent)
    output = router.route(params, {}, inputs, train=True, key=None)
    return output, gates_by_token(output, inputs.x.shape[0])


def chosen_by_loops(config, preference, mask, k_of_rows):
    """[T E] bool: each expert sorts the real tokens of a scope and takes the first c."""
    length = LENGTH if config.scope == "sequence" else ROWS * LENGTH
    taken = np.zeros(preference.shape, bool)
    k = np.where(mask.ravel(), np.repeat(k_of_rows, LENGTH), 0)
    for start in range(0, preference.shape[0], length):
        real = [t for t in range(start, start + length) if mask.ravel()[t]]
        capacity = max(int(k[start : start + length].sum()) // EXPERTS, 1)
        for expert in range(EXPERTS):
            real.sort()
            real.sort(key=lambda t: -preference[t, expert])  # stable: of equals the first
            taken[real[:capacity], expert] = True
    return taken


def gates_by_loops(config, logits, taken):
    """[T E], differentiable in the logits."""
    taken = taken.astype(np.float32)
    if config.weights == "probability":
        return jax.nn.softmax(logits, axis=-1) * taken
    positive = jnp.exp(logits) if config.weights == "post" else jax.nn.sigmoid(logits)
    positive = positive * taken
    total = positive.sum(-1, keepdims=True)
    return positive / jnp.where(total > 0, total, 1.0)


@pytest.mark.parametrize(
    ("weights", "scope"),
    [
        ("post", "sequence"),
        ("probability", "batch"),
        ("sigmoid", "sequence"),
        *[pytest.param(*pair, marks=pytest.mark.large) for pair in OTHER_PAIRS],
    ],
)
def test_against_loops_in_value_and_gradient(weights, scope):
    preference = "probability" if weights == "probability" else "logits"
    config = ExpertChoiceConfig(
        weights=weights, preference=preference, scope=scope, schedule="linear_reverse"
    )
    params, x, ratio = drawn()
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS * LENGTH, EXPERTS)))
    cotangent = cotangent.astype(jnp.float32)
    logits = x.reshape(-1, WIDTH) @ params["weight"]
    liked = np.asarray(jax.nn.softmax(logits) if preference == "probability" else logits)
    k = np.round(1 + (TOP_K - 1) * (1 - np.asarray(ratio[:, 0]))).astype(int)
    taken = chosen_by_loops(config, liked, PADDED, k)

    def ours(params, x):
        gates = route(config, params, x, ratio=ratio)[1]
        return jnp.sum(gates * cotangent), gates

    def theirs(params, x):
        gates = gates_by_loops(config, x.reshape(-1, WIDTH) @ params["weight"], taken)
        return jnp.sum(gates * cotangent), gates

    both = [
        jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(params, x)
        for function in (ours, theirs)
    ]
    assert (np.asarray(both[0][0][1] > 0) == taken).all()
    assert_close(*both, "matmul")


@pytest.mark.parametrize("top_k", [2, EXPERTS])
def test_every_expert_takes_exactly_c_tokens(top_k):
    """Every expert of every sequence takes exactly c tokens: sum_t k_t = E c."""
    params, x, _ = drawn(2)
    whole = np.ones((ROWS, LENGTH), bool)
    output, gates = route(ExpertChoiceConfig(), params, x, whole, top_k=top_k)
    load = np.asarray(gates > 0).reshape(ROWS, LENGTH, EXPERTS).sum(1)
    capacity = LENGTH * top_k // EXPERTS
    assert (load == capacity).all()
    assert (gates > 0).sum() == ROWS * EXPERTS * capacity == ROWS * LENGTH * top_k
    assert output.statistics.counts.tolist() == [ROWS * capacity] * EXPERTS
    # Padding counts nowhere: c follows the real tokens, is rounded down, and at least 1.
    load = np.asarray(route(ExpertChoiceConfig(), params, x, top_k=top_k)[1] > 0)
    real = PADDED.sum(1)
    wanted = np.where(real > 0, np.maximum(real * top_k // EXPERTS, 1), 0)
    assert (load.reshape(ROWS, LENGTH, EXPERTS).sum(1) == wanted[:, None]).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_mean_k_of_schedules(schedule):
    """The mean over uniform r is (k_min + k_max) / 2; the bell's is 20.03, its reverse's 19.97."""
    ratio = jnp.asarray((np.arange(100_000) + 0.5) / 100_000, jnp.float32)
    k = np.asarray(scheduled_k(ratio, schedule=schedule, k_min=8, k_max=32), np.float64)
    wanted = {"constant": 32.0, "gaussian": 20.03, "gaussian_reverse": 19.97}.get(schedule, 20.0)
    assert abs(k.mean() - wanted) < 5e-3
    assert k.min() >= 8 and k.max() == 32


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_monotone_and_symmetric(schedule):
    ratio = jnp.linspace(0.0, 1.0, 201)
    k = np.asarray(scheduled_k(ratio, schedule=schedule, k_min=2, k_max=14))
    slopes = np.diff(k)
    if schedule == "constant":
        assert (k == 14).all()
    elif schedule.startswith("gaussian"):
        sign = 1 if schedule == "gaussian" else -1
        assert (sign * slopes[:100] >= 0).all() and (sign * slopes[100:] <= 0).all()
        assert k[0] == k[-1] == (2 if sign == 1 else 14) and k[100] == (14 if sign == 1 else 2)
    else:
        sign = -1 if schedule.endswith("reverse") else 1
        assert (sign * slopes >= 0).all() and sorted(k[[0, -1]]) == [2, 14]
        other = schedule.removesuffix("_reverse") if sign == -1 else f"{schedule}_reverse"
        mirror = np.asarray(scheduled_k(1.0 - ratio, schedule=other, k_min=2, k_max=14))
        assert np.abs(k - mirror).max() <= 1 and (k != mirror).mean() < 0.02  # rounding at halves


def test_capacity_follows_the_masked_share():
    params, x, ratio = drawn(3)
    config = ExpertChoiceConfig(schedule="linear_reverse", k_min=1)
    whole = np.ones((ROWS, LENGTH), bool)
    gates = route(config, params, x, whole, ratio)[1]
    load = np.asarray(gates > 0).reshape(ROWS, LENGTH, EXPERTS).sum(1)
    wanted = np.asarray(scheduled_k(ratio[:, 0], schedule="linear_reverse", k_min=1, k_max=TOP_K))
    assert (load == (LENGTH * wanted // EXPERTS)[:, None]).all()
    assert len(set(wanted.tolist())) == 3


def test_empty_slots_have_no_weight_and_no_gradient():
    params, x, _ = drawn(4)
    config = ExpertChoiceConfig(schedule="linear_reverse")
    ratio = jnp.ones((ROWS, LENGTH), jnp.float32)  # one expert a token, slots for three

    def scores(params):
        selection = route(config, params, x, ratio=ratio)[0].selection
        return jnp.exp(selection.scores), selection

    gates, selection = jax.jit(scores)(params)
    is_empty = np.asarray(selection.expert_ids == EXPERTS)
    assert is_empty.mean() > 0.5
    assert (gates[is_empty] == 0.0).all() and np.isneginf(selection.scores[is_empty]).all()
    assert (gates[~is_empty] > 0.0).all()
    slopes = np.asarray(jax.jacrev(lambda p: scores(p)[0])(params)["weight"])
    assert np.isfinite(slopes).all() and (slopes[is_empty] == 0.0).all()


def test_sequences_are_independent():
    params, x, _ = drawn(5)
    config = ExpertChoiceConfig()
    alone = [route(config, params, x[i : i + 1], PADDED[i : i + 1])[1] for i in range(ROWS)]
    together = route(config, params, x)[1]
    assert_close(jnp.concatenate(alone), together, "elementwise")
    moved = route(config, params, x.at[0].add(3.0))[1]
    assert (moved[LENGTH:] == together[LENGTH:]).all()


@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("kind", [pytest.param("drawn", marks=pytest.mark.large), "ties"])
def test_eight_devices_equal_one(scope, kind):
    """Rows over (data, expert), positions over seq; of equals still the first, wherever it is."""
    params, x, ratio = drawn(6)
    if kind == "ties":
        x = jnp.round(x)
        params = {"weight": jnp.round(params["weight"])}
    config = ExpertChoiceConfig(schedule="cosine", scope=scope)
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "seq"), axis_types=(AxisType.Auto,) * 3)
    tokens = PartitionSpec(("data", "expert"), "seq")

    def local(params, x, mask, ratio, index):
        router = config.build(num_experts=EXPERTS, top_k=TOP_K, embed_dim=WIDTH)
        extent = Extent(
            sequence_length=x.shape[1], sequence_axes=("seq",), batch_axes=("data", "expert")
        )
        inputs = inputs_of(x, mask, ratio, extent)
        inputs = dataclasses.replace(inputs, context=inputs.context | {"index": index.reshape(-1)})
        output = router.route(params, {}, inputs, train=True, key=None)
        gates = gates_by_token(output, inputs.x.shape[0])
        statistics = jax.lax.psum(output.statistics, mesh.axis_names)
        return gates.reshape(*x.shape[:2], EXPERTS), statistics

    spread = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), tokens, tokens, tokens, tokens),
        out_specs=(tokens, PartitionSpec()),
    )
    index = jnp.arange(ROWS * LENGTH, dtype=jnp.int32).reshape(ROWS, LENGTH)
    mask = jnp.asarray(PADDED)

    def squares(function):
        """Compile a function of params to its gates and statistics, and their gradient."""

        def loss(params):
            gates, statistics = function(params)
            return jnp.sum(gates**2), (gates, statistics)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    def alone(params):
        output, gates = route(config, params, x, ratio=ratio)
        return gates, output.statistics

    (_, (gates, statistics)), gradient = squares(alone)(params)
    (_, (theirs, summed)), theirs_gradient = squares(
        lambda params: spread(params, x, mask, ratio, index)
    )(params)
    assert_close(theirs.reshape(-1, EXPERTS), gates, "elementwise")
    assert_close(summed, statistics, "elementwise")
    assert_close(theirs_gradient, gradient, "matmul")


MOE = MoEConfig(
    num_experts=4,
    top_k=2,
    expert_dim=10,
    router=ExpertChoiceConfig(schedule="linear_reverse"),
    gate=SoftmaxGateConfig(),
    balancers=(RouterZConfig(),),
)


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize("mesh", ["replica2_data2_expert2", "data8", "data4_tensor2"])
def test_model_is_the_same_on_every_mesh(mesh):
    assert_close(loss_on_mesh(MOE, mesh), loss_on_one_device(MOE), "end_to_end")


@pytest.mark.large
def test_rematerialisation_changes_nothing():
    recomputed = loss_on_one_device(MOE, ExecutionConfig(remat="full"))
    assert_close(recomputed, loss_on_one_device(MOE), "end_to_end")


def _refused(text, build):
    with pytest.raises(ValueError, match=re.escape(text)):
        build()


def test_incompatible_parts_are_refused():
    def moe(**parts):
        return dataclasses.replace(MOE, **parts)

    _refused("router.k_min=0 must be at least 1", lambda: ExpertChoiceConfig(k_min=0))
    _refused(
        "router.k_max=2 must not be below router.k_min=3",
        lambda: ExpertChoiceConfig(k_min=3, k_max=2),
    )
    _refused(
        "a schedule above K_max: router.k_max=3 must not exceed moe.top_k=2",
        lambda: moe(router=ExpertChoiceConfig(k_max=3)),
    )
    _refused(
        "a schedule above K_max: router.k_min=3", lambda: moe(router=ExpertChoiceConfig(k_min=3))
    )
    _refused("defines its own gates", lambda: moe(gate=RenormalizedGateConfig()))
    _refused("evens the load by itself", lambda: moe(balancers=(LoadBalanceConfig(),)))
    _refused("leave moe.capacity out", lambda: moe(capacity=CapacityConfig()))
    _refused(
        "leave moe.zero_computation out", lambda: moe(zero_computation=ZeroComputationConfig())
    )
    router = MOE.router.build(num_experts=4, top_k=2, embed_dim=WIDTH)
    x = jnp.ones((LENGTH, WIDTH))
    inputs = RouterInputs(
        x=x, token_mask=jnp.ones(LENGTH, bool), segment_ids=jnp.ones(LENGTH, jnp.int32)
    )
    params, _ = router.init(jax.random.key(0))
    _refused(
        "context has no mask_ratio",
        lambda: router.route(params, {}, inputs, train=True, key=None),
    )
