# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token rounding against loops in numpy: loads, gates, gradients, keys, scopes and meshes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe.layer import MoELayer
from jaxmoe.layers.records import RoutingInputs
from jaxmoe.routing import (
    CAPACITIES,
    GATES,
    ROUTERS,
    CapacityConfig,
    ExpertChoiceConfig,
    Extent,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
    TokenRoundingConfig,
    ZeroComputationConfig,
    capacity,
)
from jaxmoe.routing.capacity import RouterChoice
from jaxmoe.routing.telemetry import summarise
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.loss import forward_and_nll
from sharding.assignments import Assignments
from sharding.distributed import global_batch
from sharding.expert_parallel import AllToAllConfig, ExpertAxes, LocalConfig, expert_parallel
from tests.support import dense_moe
from tests.support.meshes import EXECUTIONS, mesh_of
from tests.support.models import BATCH, WIDE, WIDE_LENGTH, tokens_for
from tests.support.routing_inputs import inputs_of
from tests.support.tolerances import assert_close

ROWS, LENGTH, WIDTH, EXPERTS, TOP_K = 4, 16, 5, 4, 2
TOKENS = ROWS * LENGTH
MASK = np.arange(TOKENS) % 11 != 7
"""Every eleventh token is padding."""

SCORES = {
    "before": (SoftmaxTopKConfig(softmax="before"), jax.nn.softmax),
    "after": (SoftmaxTopKConfig(softmax="after"), None),
    "sigmoid": (ROUTERS["sigmoid_topk"](), jax.nn.sigmoid),
    "sqrt_softplus": (ROUTERS["sqrt_softplus_topk"](), lambda z: jnp.sqrt(jax.nn.softplus(z))),
}


def drawn(seed):
    """Router weights and tokens; loads are skewed towards the first experts."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(WIDTH, EXPERTS)) + 0.5 * np.linspace(1.0, -1.0, EXPERTS)
    x = rng.normal(size=(TOKENS, WIDTH)) + 0.3
    return {"weight": jnp.asarray(weight, jnp.float32)}, jnp.asarray(x, jnp.float32)


def rounded(config, params, x, key=None, *, router=None, gate=None, extent=None, **arrays):
    """Return the assignments and statistics of the router's choice once it is rounded."""
    router = router or SoftmaxTopKConfig()
    gate = gate or SoftmaxGateConfig()
    inputs = inputs_of(
        x,
        mask=arrays.get("mask", jnp.asarray(MASK)),
        index=arrays.get("index"),
        extent=extent or Extent(sequence_length=LENGTH),
    )
    built = router.build(num_experts=EXPERTS, top_k=TOP_K, embed_dim=WIDTH)
    output = built.route(params, {}, inputs, train=True, key=jax.random.key(0))
    assignments = gate.assign(output.selection)
    choice = RouterChoice(assignments, output, inputs, gate, num_experts=EXPERTS, key=key)
    return config.assign(choice), choice.assignments


compiled = functools.partial(jax.jit, static_argnames=("config", "router", "gate", "extent"))
rounded_alone = compiled(rounded)


def pairs(assignments, tokens=TOKENS):
    """[T E] f32: the gate of each pair; and how often each pair is computed."""
    shape = (tokens, EXPERTS + 1)
    place = (assignments.token_ids, assignments.expert_ids)
    times = jnp.zeros(shape).at[place].add(1.0)[:, :EXPERTS]
    return jnp.zeros(shape).at[place].add(assignments.gates)[:, :EXPERTS], times


def target_of(load, tile, most):
    """The nearest multiple of the tile, of two the one with an even number of tiles."""
    tiles = min((abs(n * tile - load), n % 2, n) for n in range(load // tile + 2))[2]
    return tile * (tiles if tiles * tile <= most else load // tile)


def rounded_by_loops(chosen, gates, mask, config, targets=None):
    """[T E] bool: expert by expert, first those that chose it, then the others, by gate.

    Args:
        chosen: [T E] bool.
        gates: [T E]: of every pair.
        mask: [T] bool.
        config: Tile and scope.
        targets: Function from the load and the largest one to the load to be had.
    """
    computed = np.zeros_like(chosen)
    length = LENGTH if config.scope == "sequence" else TOKENS
    for start in range(0, TOKENS, length):
        tokens = [t for t in range(start, start + length) if mask[t]]
        for expert in range(EXPERTS):
            ranked = sorted(tokens, key=lambda t: (not chosen[t, expert], -gates[t, expert], t))
            load = int(chosen[tokens, expert].sum())
            number = (targets or target_of)(load, config.tile, len(tokens))
            computed[ranked[:number], expert] = True
    return computed


def pair_gates(logits, chosen, name, gate):
    """[T E], differentiable: the gate of each pair beside those that are chosen."""
    function = SCORES[name][1]
    scores = jnp.exp(logits) if function is None else function(logits)
    if gate != "softmax" or function is None:
        sums = jnp.sum(jnp.where(chosen, scores, 0.0), axis=1, keepdims=True)
        scores = scores / jnp.where(chosen.any(1, keepdims=True), sums, 1.0)
    return jnp.sqrt(scores) if gate == "sqrt" else scores


def chosen_of(params, x):
    return dense_moe.choose(np.asarray(x @ params["weight"]), TOP_K, MASK)


def loads_of(computed, config):
    groups = ROWS if config.scope == "sequence" else 1
    return np.asarray(computed).reshape(groups, -1, EXPERTS).sum(1)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
@settings(max_examples=20)
@given(seed=st.integers(0, 2**16), tile=st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_nearest_against_loops(scope, seed, tile):
    config = TokenRoundingConfig(tile=tile, scope=scope)
    params, x = drawn(seed)
    (after, statistics), before = rounded_alone(config, params, x)
    gates, times = pairs(after)
    chosen = chosen_of(params, x)
    all_gates = np.asarray(jax.nn.softmax(x @ params["weight"]))
    computed = rounded_by_loops(chosen, all_gates, MASK, config)
    assert times.tolist() == computed.astype(float).tolist()  # each pair once at most
    assert_close(np.asarray(gates), np.where(computed, all_gates, 0.0), "elementwise")
    loads, asked = loads_of(computed, config), loads_of(chosen, config)
    assert (loads % tile == 0).all()
    is_raised = np.asarray([target_of(int(f), tile, TOKENS) for f in asked.ravel()])
    has_room = is_raised.reshape(asked.shape) == loads
    assert (2 * np.abs(loads - asked) <= tile)[has_room].all()
    assert (np.abs(loads - asked) < max(tile, 2)).all()
    assert float(statistics[capacity.ADDED]) == (computed & ~chosen).sum()
    size = TOKENS * TOP_K + (ROWS if scope == "sequence" else 1) * EXPERTS * (tile // 2)
    assert after.expert_ids.shape == (size,) and after.top_k is None
    assert before.top_k == TOP_K


def test_worked_example():
    """A tile of 2: expert 0 is chosen by 3 tokens of 4, expert 1 by one; halves go to even."""
    logits = np.asarray([[3.0, 0.0], [1.0, 0.5], [2.0, 0.0], [0.0, 1.0]], np.float32)
    chosen = np.asarray([[1, 0], [1, 0], [1, 0], [0, 1]], bool)
    config = TokenRoundingConfig(tile=2)
    assert [target_of(load, 2, 4) for load in range(5)] == [0, 0, 2, 4, 4]
    params = {"weight": jnp.eye(2, dtype=jnp.float32)}
    inputs = inputs_of(jnp.asarray(logits), extent=Extent(sequence_length=4))
    router = SoftmaxTopKConfig().build(num_experts=2, top_k=1, embed_dim=2)
    output = router.route(params, {}, inputs, train=True, key=None)
    selection = output.selection
    gate = SoftmaxGateConfig()
    before = Assignments(selection.token_ids, selection.expert_ids, jnp.exp(selection.scores), 1)
    assert selection.expert_ids.tolist() == np.argmax(chosen, axis=1).tolist()
    assign = jax.jit(lambda *records: config.assign(RouterChoice(*records, gate, num_experts=2)))
    after, statistics = assign(before, output, inputs)
    # Expert 0 takes the fourth token too, expert 1 drops its only one.
    assert after.expert_ids.tolist() == [0, 0, 0, 2, 0, 2]
    assert after.token_ids.tolist()[:5] == [0, 1, 2, 3, 3]
    assert after.gates[4] == pytest.approx(1.0 / (1.0 + np.e)) and after.gates[3] == 0.0
    assert float(statistics[capacity.ADDED]) == 1.0


def test_loads_that_are_multiples_stay():
    config = TokenRoundingConfig(tile=1)
    params, x = drawn(3)
    (after, statistics), before = rounded_alone(config, params, x)
    number = before.expert_ids.shape[0]
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(ours[:number], theirs)
    assert float(statistics[capacity.ADDED]) == 0.0


def test_stochastic_loads_are_the_same_in_expectation():
    """The standard error of a mean over n keys is at most M / (2 sqrt(n))."""
    tile, number = 4, 600
    config = TokenRoundingConfig(tile=tile, rounding="stochastic")
    params, x = drawn(5)
    chosen = chosen_of(params, x)

    @jax.jit
    @jax.vmap
    def loads(key):
        (after, _), _ = rounded(config, params, x, key)
        return pairs(after)[1].reshape(ROWS, LENGTH, EXPERTS).sum(1)

    found = np.asarray(loads(jax.random.split(jax.random.key(1), number)))
    asked = loads_of(chosen, config)
    assert (found % tile == 0).all() and (np.abs(found - asked) < tile).all()
    most = MASK.reshape(ROWS, LENGTH).sum(1)[:, None]
    has_room = (asked // tile + 1) * tile <= most
    assert has_room.sum() >= 12
    error = np.abs(found.mean(0) - asked)[has_room]
    assert error.max() < 4.5 * tile / (2 * number**0.5)
    assert abs(found.mean(0)[has_room].sum() - asked[has_room].sum()) < 3 * tile
    # Rows and experts draw apart.
    drawn_up = (found > asked).reshape(number, -1)[:, (asked % tile != 0).ravel()]
    correlation = np.corrcoef(drawn_up.T) - np.eye(drawn_up.shape[1])
    assert np.abs(correlation).max() < 0.25


def test_stochastic_rounding_takes_the_tokens_of_the_loops():
    config = TokenRoundingConfig(tile=4, rounding="stochastic")
    params, x = drawn(6)
    (after, _), _ = rounded_alone(config, params, x, jax.random.key(4))
    times = np.asarray(pairs(after)[1]).astype(bool)
    loads = iter(loads_of(times, config).ravel().tolist())
    gates = np.asarray(jax.nn.softmax(x @ params["weight"]))
    chosen = chosen_of(params, x)
    wanted = rounded_by_loops(chosen, gates, MASK, config, lambda *sizes: next(loads))
    assert times.tolist() == wanted.tolist()
    with pytest.raises(ValueError, match="give `key`"):
        rounded(config, params, x)


@pytest.mark.parametrize(
    ("name", "gate"),
    [("before", "softmax"), ("after", "softmax"), ("before", "sqrt"), ("sigmoid", "renormalized"),
     ("sqrt_softplus", "softmax")],
)  # fmt: skip
def test_gates_and_their_gradient_against_loops(name, gate):
    """Gates are those beside the chosen experts, for pairs that stay and that are added."""
    config = TokenRoundingConfig(tile=4)
    params, x = drawn(7)
    router = SCORES[name][0]
    chosen = chosen_of(params, x)
    every = np.asarray(pair_gates(x @ params["weight"], chosen, name, gate))
    computed = rounded_by_loops(chosen, every, MASK, config)
    assert (computed & ~chosen).any() and (chosen & ~computed).any()
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=every.shape), jnp.float32)

    def ours(params, x):
        (after, _), _ = rounded(config, params, x, router=router, gate=GATES[gate]())
        gates, _ = pairs(after)
        return jnp.sum(gates * cotangent), gates

    def theirs(params, x):
        gates = pair_gates(x @ params["weight"], chosen, name, gate)
        gates = jnp.where(computed, gates, 0.0)
        return jnp.sum(gates * cotangent), gates

    both = [
        jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(params, x)
        for function in (ours, theirs)
    ]
    assert_close(*both, "matmul")


@pytest.mark.parametrize(
    "config",
    [
        TokenRoundingConfig(tile=4),
        TokenRoundingConfig(tile=4, scope="batch"),
        TokenRoundingConfig(tile=4, rounding="stochastic"),
        TokenRoundingConfig(tile=4, rounding="stochastic", scope="batch"),
    ],
    ids=lambda config: f"{config.rounding}-{config.scope}",
)
def test_eight_devices_round_as_one(config):
    """Rows are spread over data and expert, positions over seq."""
    params, x = drawn(8)
    key = jax.random.key(9)
    (alone, added), _ = rounded_alone(config, params, x, key)
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "expert", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    spread, whole = PartitionSpec(("data", "expert"), "seq"), PartitionSpec()
    extent = Extent(
        sequence_length=LENGTH // 2, sequence_axes=("seq",), batch_axes=("data", "expert")
    )

    def local(params, key, x, mask, index):
        rows, length = index.shape
        arrays = {"mask": mask.reshape(-1), "index": index.reshape(-1)}
        (after, added), _ = rounded(
            config, params, x.reshape(-1, WIDTH), key, extent=extent, **arrays
        )
        gates, _ = pairs(after, rows * length)
        added = jax.lax.psum(added[capacity.ADDED], mesh.axis_names)
        return gates.reshape(rows, length, EXPERTS), added

    index = jnp.arange(TOKENS, dtype=jnp.int32).reshape(ROWS, LENGTH)
    with jax.set_mesh(mesh):
        gates, number = jax.jit(
            jax.shard_map(
                local, in_specs=(whole, whole, spread, spread, spread), out_specs=(spread, whole)
            )
        )(params, key, x.reshape(ROWS, LENGTH, -1), jnp.asarray(MASK).reshape(ROWS, LENGTH), index)
    assert_close(np.asarray(gates).reshape(TOKENS, EXPERTS), pairs(alone)[0], "elementwise")
    assert float(number) == float(added[capacity.ADDED]) > 0


# The layer and models.

LAYER = dataclasses.replace(WIDE.moe, capacity=TokenRoundingConfig(tile=2), num_shared_experts=0)


@pytest.fixture(scope="module")
def values():
    model = dataclasses.replace(WIDE, moe=LAYER, num_layers=1)
    params = init_params(model, jax.random.key(0))["moe_blocks_0"]["moe"]
    params = jax.tree.map(lambda leaf: 2.0 * leaf[0], params)
    x = jax.random.normal(jax.random.key(2), (BATCH, WIDE_LENGTH, WIDE.embed_dim))
    return params, x, jnp.asarray(np.arange(x.size // WIDE.embed_dim) % 13 != 5).reshape(BATCH, -1)


def apply_layer(moe, params, x, mask, *, train=True):
    model = dataclasses.replace(WIDE, moe=moe, num_layers=1)
    layer = MoELayer(moe, model.context, EXECUTIONS["expert8"], train=train)
    routing = RoutingInputs(token_mask=mask, segment_ids=mask.astype(jnp.int32), router_state={})
    y, outputs = layer.apply({"params": params}, x, routing)
    return y, outputs.statistics


@pytest.mark.large
@pytest.mark.rows(1)
def test_layer_equals_dense_oracle_in_value_and_gradient(values):
    params, x, mask = values
    flat, real = np.asarray(x).reshape(-1, x.shape[-1]), np.asarray(mask).ravel()
    logits = flat @ np.asarray(params["router"]["weight"])
    chosen = dense_moe.choose(logits, LAYER.top_k, real)

    def gates_of(logits):
        share = jax.nn.softmax(logits, axis=-1)
        sums = jnp.sum(jnp.where(chosen, share, 0.0), axis=1, keepdims=True)
        return jnp.sqrt(share / jnp.where(chosen.any(1, keepdims=True), sums, 1.0))

    every = np.asarray(gates_of(jnp.asarray(logits)))
    computed = np.zeros_like(chosen)
    for start in range(0, len(real), WIDE_LENGTH):
        tokens = [t for t in range(start, start + WIDE_LENGTH) if real[t]]
        for expert in range(LAYER.num_experts):
            ranked = sorted(tokens, key=lambda t: (not chosen[t, expert], -every[t, expert], t))
            load = int(chosen[tokens, expert].sum())
            computed[ranked[: target_of(load, 2, len(tokens))], expert] = True
    assert (computed & ~chosen).any() and (chosen & ~computed).any()
    cotangent = jax.random.normal(jax.random.key(3), x.shape)

    @jax.jit
    def ours(params, x):
        (y, statistics), back = jax.vjp(lambda p, x: apply_layer(LAYER, p, x, mask), params, x)
        return y, back((cotangent, jax.tree.map(jnp.zeros_like, statistics))), statistics

    @jax.jit
    def theirs(params, x):
        def dense(params, x):
            tokens = x.reshape(-1, x.shape[-1])
            gates = jnp.where(computed, gates_of(tokens @ params["router"]["weight"]), 0.0)
            experts = params["experts"]
            y = sum(
                gates[:, e, None]
                * dense_moe.swiglu(tokens, experts["gate_up"][e], experts["down"][e])
                for e in range(LAYER.num_experts)
            )
            return y.reshape(x.shape)

        y, back = jax.vjp(dense, params, x)
        return y, back(cotangent)

    y, gradients, statistics = ours(params, x)
    assert_close((y, gradients), theirs(params, x), "end_to_end")
    assert statistics.counts.tolist() == chosen.sum(0).tolist()
    assert statistics.kept.tolist() == computed.sum(0).tolist()
    assert (statistics.kept % 2 == 0).all()
    summary = summarise(jax.tree.map(lambda leaf: leaf[None], statistics))
    number = chosen.sum()
    assert float(summary["dropped_fraction"]) == pytest.approx((chosen & ~computed).sum() / number)
    assert float(summary["added_fraction"]) == pytest.approx((computed & ~chosen).sum() / number)


def test_evaluation_computes_the_choice_of_the_router(values):
    """Bit for bit the layer without rounding; training does not."""
    plain = dataclasses.replace(LAYER, capacity=None)
    in_evaluation = [
        jax.jit(functools.partial(apply_layer, moe, train=False))(*values) for moe in (LAYER, plain)
    ]
    for ours, theirs in zip(*map(jax.tree.leaves, in_evaluation), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    rounded_y, _ = jax.jit(functools.partial(apply_layer, LAYER))(*values)
    assert np.abs(rounded_y - in_evaluation[0][0]).max() > 0.01


def rows_of_batch():
    """Rows of two documents, one of them with padding."""
    tokens, targets = map(np.asarray, tokens_for(WIDE, length=WIDE_LENGTH))
    segments = np.ones_like(tokens)
    segments[:, 8:] = 2
    segments[3, 11:] = 0
    weights = (segments != 0).astype(np.float32)
    return Batch(tokens=tokens, targets=targets, loss_weights=weights, segment_ids=segments)


def loss_and_gradients(config, execution):
    model = dataclasses.replace(WIDE, moe=dataclasses.replace(LAYER, capacity=config))
    params = init_params(model, jax.random.key(0))

    def loss(params, batch):
        nll, output = forward_and_nll(
            model, execution, params, batch, train=True, key=jax.random.key(5)
        )
        return nll / 100.0 + sum(output.losses.values()), output.statistics

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    if execution == ExecutionConfig():
        return gradient(params, rows_of_batch())
    mesh = mesh_of(execution)
    table = parameter_table(model, rules=execution.axis_rules)
    params = jax.device_put(params, table.tree(lambda row: NamedSharding(mesh, row.spec)))
    with jax.set_mesh(mesh):
        return gradient(params, global_batch(rows_of_batch(), mesh))


on_one_device = functools.cache(functools.partial(loss_and_gradients, execution=ExecutionConfig()))
MODEL_CASES = [
    ("expert8_all_to_all", "nearest", "sequence"),
    ("expert8_all_to_all", "stochastic", "batch"),
    ("seq2_tensor2_all_gather", "stochastic", "sequence"),
    ("seq2_expert2_tensor2_ulysses", "nearest", "batch"),
    ("data2_expert4_least_loaded", "nearest", "sequence"),
]


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize(("name", "rounding", "scope"), MODEL_CASES)
def test_model_is_the_same_on_every_mesh(name, rounding, scope):
    """Loss, statistics and gradients, with experts and positions on several devices."""
    config = TokenRoundingConfig(tile=2, rounding=rounding, scope=scope)
    result = loss_and_gradients(config, EXECUTIONS[name])
    assert_close(result, on_one_device(config), "end_to_end")
    statistics = result[0][1]
    assert (np.asarray(statistics.kept) % 2 == 0).all()
    assert statistics.counts.tolist() != statistics.kept.tolist()


@pytest.mark.parametrize("dispatcher", [LocalConfig(), AllToAllConfig()], ids=["local", "sent"])
def test_groups_of_every_device_are_whole_tiles(dispatcher):
    """Rows of the batch are spread over eight devices, with all experts on each or half of one."""
    config = TokenRoundingConfig(tile=4)
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params, x = drawn(10)
    names = ("expert",) if isinstance(dispatcher, AllToAllConfig) else ()

    def local(params, x, mask):
        extent = Extent(sequence_length=LENGTH, batch_axes=("data", "expert"))
        (after, _), _ = rounded(config, params, x, extent=extent, mask=mask)

        def count(weights, rows, sizes, gates):
            del weights, gates
            return rows.at[:, 0].set(jnp.sum(sizes % 4).astype(rows.dtype)) * 1.0

        weights = jnp.zeros((EXPERTS // (2 if names else 1), 1))
        axes = ExpertAxes(expert=names)
        y, _ = expert_parallel(
            x, after, count, weights, num_experts=EXPERTS, config=dispatcher, axes=axes
        )
        return y

    spread = PartitionSpec(("data", "expert"))
    with jax.set_mesh(mesh):
        y = jax.jit(
            jax.shard_map(
                local,
                in_specs=(PartitionSpec(), spread, spread),
                out_specs=spread,
                check_vma=False,
            )
        )(params, x, jnp.asarray(MASK))
    assert np.abs(y[:, 1:]).max() > 0.1 and not np.asarray(y[:, 0]).any()


def refused(text, build):
    with pytest.raises(ValueError, match=re.escape(text)):
        build()


def test_what_does_not_fit_is_refused(values):
    def moe(**parts):
        return dataclasses.replace(LAYER, **parts)

    coarse = dataclasses.replace(LAYER, capacity=TokenRoundingConfig())
    refused("capacity.tile=0 must be at least 1", lambda: TokenRoundingConfig(tile=0))
    refused(
        "moe.capacity=token_rounding is about rows of experts that compute",
        lambda: moe(zero_computation=ZeroComputationConfig()),
    )
    refused(
        "leave moe.capacity out",
        lambda: moe(router=ExpertChoiceConfig(), gate=SoftmaxGateConfig(), balancers=()),
    )
    refused(
        "moe.capacity.tile=128 exceeds the even load of an expert, 16 tokens times 2 of 8 experts,"
        " 4: rounding would leave experts without tokens; set moe.capacity.tile to 4 or less",
        lambda: jax.eval_shape(functools.partial(apply_layer, coarse), *values),
    )
    refused(
        "execution.dispatcher.num_chunks=2 cuts assignments by token",
        lambda: LAYER.check_execution(
            EXECUTIONS["data2_expert4_chunks"],
            sequences=4,
            length=WIDE_LENGTH,
            mesh={"data": 2, "expert": 4},
        ),
    )
    assert set(CAPACITIES) == {CapacityConfig.name, TokenRoundingConfig.name}


def test_a_comparison_takes_two_tiles_an_expert():
    config = TokenRoundingConfig()
    assert [config.sized_for(rows_per_expert=n).tile for n in (1.0, 4.0, 16.0, 17.0, 300.0)] == [
        1, 2, 8, 8, 128,
    ]  # fmt: skip
