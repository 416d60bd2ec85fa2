# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every dispatcher equals a loop over experts, in value and in every gradient."""

import functools
import math
import re
from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxmoe.contrib.token_routes.least_loaded import LeastLoadedConfig
from jaxmoe.contrib.token_routes.token_shuffle import ShuffledTokens, shuffle
from jaxmoe.planning.hlo import collectives
from pallas_kernels import grouped_swiglu
from sharding.assignments import Assignments
from sharding.expert_parallel import (
    AllGatherConfig,
    AllToAllConfig,
    AllToAllDroppingConfig,
    ExpertAxes,
    LocalConfig,
    expert_parallel,
    transport,
)
from sharding.expert_parallel.all_to_all_dropping import first_of_each_device
from sharding.expert_parallel.permute import move_rows
from sharding.expert_parallel.transport import TransportChoice, choose_transport, exchange
from tests.support import ragged
from tests.support.dense_moe import swiglu
from tests.support.tolerances import assert_close

T, K, E, D, F = 32, 3, 8, 4, 6  # tokens of all devices

# Sizes by axis, and the axes of experts; tokens are sharded over all axes of the mesh.
LAYOUTS = {
    "expert1": ({"data": 2, "expert": 1}, ExpertAxes(expert=("expert",))),
    "expert2": ({"data": 4, "expert": 2}, ExpertAxes(expert=("expert",))),
    "expert4": ({"expert": 4}, ExpertAxes(expert=("expert",))),
    "expert8": ({"expert": 8}, ExpertAxes(expert=("expert",))),
    "expert2x2": ({"a": 2, "b": 2}, ExpertAxes(expert=("a", "b"))),
    "expert2x2_reversed": ({"a": 2, "b": 2, "c": 2}, ExpertAxes(expert=("c", "a"))),
    "expert4_tensor2": (
        {"expert": 4, "etp": 2},
        ExpertAxes(expert=("expert",), expert_tensor=("etp",)),
    ),
    "tensor2": ({"data": 2, "etp": 2}, ExpertAxes(expert_tensor=("etp",))),
}
CONFIGS = {
    "all_gather": AllGatherConfig(),
    "equal": AllToAllConfig(transport="equal"),
    "ragged": AllToAllConfig(transport="ragged"),
    "chunks": AllToAllConfig(num_chunks=2),
    "sent_again": AllToAllConfig(experts_keep="inputs"),
    "dropping_sent_again": AllToAllDroppingConfig(capacity_factor=8.0, experts_keep="inputs"),
    "dropping_roomy": AllToAllDroppingConfig(capacity_factor=8.0),
    "dropping_roomy_ragged": AllToAllDroppingConfig(capacity_factor=8.0, transport="ragged"),
    "least_loaded": LeastLoadedConfig(threshold=1.0, min_rows=1),
    "least_loaded_ragged": LeastLoadedConfig(
        borrowed=1, threshold=1.0, min_rows=1, transport="ragged"
    ),
}
ROUTINGS = ("even", "one_expert", "few_experts", "empty_slots")


# Saved before they are replaced.
CHOOSE, RAGGED = choose_transport, jax.lax.ragged_all_to_all


@pytest.fixture(autouse=True)
def ragged_on_the_cpu(monkeypatch):
    """Replace the primitive by an emulation, and let choose_transport accept it."""

    def choose(requested=None):
        return TransportChoice(transport=requested or "equal", reason="this is a test")

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged.ragged_all_to_all)
    monkeypatch.setattr(transport, "choose_transport", choose)


def routed(routing):
    """Experts and gates [T K]; a token's experts differ."""
    random = np.random.default_rng(ROUTINGS.index(routing))
    expert_ids = np.argsort(random.random((T, E)), 1)[:, :K].astype(np.int32)
    gates = random.uniform(0.5, 1.5, (T, K)).astype(np.float32)
    if routing == "one_expert":
        expert_ids[:] = [E, E - 2, E]
    if routing == "few_experts":  # on one device of each layout, and full to the worst case
        expert_ids[:] = np.argsort(random.random((T, K)), 1) + E - K
    if routing == "empty_slots":
        expert_ids[random.random((T, K)) < 0.4] = E
        expert_ids[:5] = E
    return expert_ids, np.where(expert_ids < E, gates, np.float32(0))


@functools.cache
def tensors():
    """Return x, weights, and the cotangent of the outputs."""
    keys = jax.random.split(jax.random.key(7), 4)
    x, cotangent = jax.random.normal(keys[0], (2, T, D))
    gate_up = jax.random.normal(keys[1], (E, D, 2, F)) / 2
    return x, {"gate_up": gate_up, "down": jax.random.normal(keys[2], (E, F, D)) / 2}, cotangent


def oracle(x, gates, weights, expert_ids):
    """Compute every token with every expert."""
    y = jnp.zeros_like(x)
    for expert in range(weights["down"].shape[0]):
        gate = jnp.where(expert_ids == expert, gates, 0.0).sum(1)
        y += gate[:, None] * swiglu(x, weights["gate_up"][expert], weights["down"][expert])
    return y


def experts(weights, rows, group_sizes, gates, *, indices=None):
    matrices = (weights["gate_up"], weights["down"])
    return grouped_swiglu(rows, *matrices, group_sizes, gates, indices=indices)


def mesh_of(layout):
    sizes, axes = LAYOUTS[layout]
    shape = tuple(sizes.values())
    mesh = jax.make_mesh(
        shape,
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[: np.prod(shape)],
    )
    return mesh, axes


def any_order(num_tokens, axes):
    """An order of the tokens of each device that fills some devices beyond their share."""
    devices = jax.lax.axis_size(axes.expert)
    key = jax.random.fold_in(jax.random.key(5), jax.lax.axis_index(axes.expert))
    wanted = jax.random.randint(key, (num_tokens,), 0, max(1, devices - 1), jnp.int32)
    return ShuffledTokens(*shuffle(wanted, jax.random.uniform(key, (num_tokens,)), devices))


def on_mesh(layout, config, *, order=None, moves_tokens=False, reads_tokens=False):
    """(x, gates, weights, expert_ids) -> y, dropped [devices E], on the mesh.

    Args:
        layout: a row of LAYOUTS.
        config: of the dispatcher.
        order: of the slots of one device, so that they are not token-major.
        moves_tokens: whether tokens first move between devices, in any order.
        reads_tokens: whether experts read tokens by index.
    """
    mesh, axes = mesh_of(layout)
    tokens = PartitionSpec(tuple(mesh.axis_names))
    spread = axes.expert if config.traits.spreads_experts and axes.expert else None
    hidden = axes.expert_tensor or None
    specs = {
        "gate_up": PartitionSpec(spread, None, None, hidden),
        "down": PartitionSpec(spread, hidden, None),
    }

    def local(x, gates, weights, expert_ids):
        top_k = gates.shape[1]
        token_ids = jnp.repeat(jnp.arange(x.shape[0], dtype=jnp.int32), top_k)
        slots = slice(None) if order is None else jnp.asarray(order)
        assignments = Assignments(
            token_ids=token_ids[slots],
            expert_ids=expert_ids.reshape(-1)[slots],
            gates=gates.reshape(-1)[slots],
            top_k=top_k if order is None else None,
        )
        moved = any_order(x.shape[0], axes) if moves_tokens else None
        y, dropped = expert_parallel(
            x,
            assignments,
            experts,
            weights,
            num_experts=E,
            config=config,
            axes=axes,
            moves=moved,
            reads_tokens=reads_tokens,
        )
        return y, dropped[None]

    given = (tokens, tokens, specs, tokens)
    return jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=(tokens, tokens))


def with_gradients(function, cotangent):
    """jit of (x, gates, weights, ids) -> value, dropped, gradients of x, gates and weights."""

    def loss(x, gates, weights, expert_ids):
        y, dropped = function(x, gates, weights, expert_ids)
        return jnp.sum(y * cotangent), (y, dropped)

    def run(*arguments):
        (_, outputs), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arguments)
        return outputs, gradients

    return jax.jit(run)


@functools.cache
def wanted():
    x, weights, cotangent = tensors()

    def plain(x, gates, weights, expert_ids):
        return oracle(x, gates, weights, expert_ids), jnp.float32(0)

    return with_gradients(plain, cotangent)


def check(function, routings):
    x, weights, cotangent = tensors()
    run = with_gradients(function, cotangent)
    for routing in routings:
        expert_ids, gates = routed(routing)
        (y, dropped), gradients = run(x, gates, weights, expert_ids)
        (y_wanted, _), gradients_wanted = wanted()(x, gates, weights, expert_ids)
        assert_close((y, gradients), (y_wanted, gradients_wanted), "matmul")
        assert not dropped.any()


QUICK = {
    ("expert2", "all_gather"),
    ("expert8", "all_gather"),
    ("expert4_tensor2", "all_gather"),
    ("expert2", "equal"),
    ("expert2x2_reversed", "equal"),
    ("expert4_tensor2", "chunks"),
    ("expert8", "ragged"),
    ("expert2x2", "ragged"),
    ("expert4", "dropping_roomy_ragged"),
    ("tensor2", "equal"),
    ("expert1", "least_loaded"),
    ("expert8", "least_loaded_ragged"),
    ("expert2x2_reversed", "least_loaded"),
    ("expert4_tensor2", "least_loaded"),
}


@pytest.mark.rows(6)
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, marks=[] if (layout, name) in QUICK else pytest.mark.slow)
        for layout in LAYOUTS
        for name in CONFIGS
    ],
)
def test_dispatcher_equals_a_loop_over_experts(layout, name):
    check(on_mesh(layout, CONFIGS[name]), ROUTINGS)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("expert1", "all_gather"),  # alone, as `local`
        ("expert2", "all_gather"),
        pytest.param("expert4_tensor2", "all_gather", marks=pytest.mark.slow),
        pytest.param("expert2", "equal", marks=pytest.mark.slow),  # whose rows travel
    ],
)
def test_experts_that_read_tokens_equal_a_loop_over_experts(layout, name):
    check(on_mesh(layout, CONFIGS[name], reads_tokens=True), ROUTINGS)


@pytest.mark.parametrize(
    "name", ["local", "local_indexed", "all_gather", "all_gather_indexed", "sent_again"]
)
def test_the_backward_pass_takes_rows_again_and_needs_no_outputs(name, capsys):
    """Kept [A ...]: the hidden units, order and gates; of the tokens' width [T D] alone."""
    config = {"local": LocalConfig(), **CONFIGS}[name.removesuffix("_indexed")]
    layout = "expert1" if "local" in name else "expert2"
    function = on_mesh(layout, config, reads_tokens="indexed" in name)
    x, weights, _ = tensors()
    gates, ids = jnp.ones((T, K)), jnp.zeros((T, K), jnp.int32)

    def loss(x, gates, weights):
        return jnp.sum(function(x, gates, weights, ids)[0])

    jax.ad_checkpoint.print_saved_residuals(jax.jit(loss), x, gates, weights)
    lines = capsys.readouterr().out.splitlines()
    inside = [line[line.index("[") : line.index("]")] for line in lines]
    shapes = [tuple(map(int, re.findall(r"\d+", numbers))) for numbers in inside]
    floating = [shape for line, shape in zip(lines, shapes, strict=True) if line.startswith("f")]
    assert [shape for shape in floating if shape[-1] == 2 * F and shape[0] != E], lines
    wide = [math.prod(shape) for shape in floating if shape[-1:] == (D,) and len(shape) == 2]
    assert wide and max(wide) <= T * D * (2 if "all_gather" in name else 1), lines


@pytest.mark.parametrize(
    "name", ["equal", *(pytest.param(n, marks=pytest.mark.slow) for n in ("all_gather", "ragged"))]
)
def test_dispatcher_with_slots_in_any_order(name):
    """As from experts that choose their tokens: top_k is None."""
    config, num_slots = CONFIGS[name], T * K // 8
    order = np.random.default_rng(3).permutation(num_slots)
    check(on_mesh("expert4_tensor2", config, order=order), ROUTINGS)


def kept_by_hand(expert_ids, num_devices, most):
    """Keep the first `most` slots for each device, in a loop."""
    kept, sent = list(expert_ids), [0] * num_devices
    for slot, expert in enumerate(expert_ids):
        if expert < E:
            device = expert * num_devices // E
            sent[device] += 1
            kept[slot] = expert if sent[device] <= most else E
    return kept


@hypothesis.given(st.lists(st.integers(0, E), min_size=12, max_size=12), st.integers(0, 12))
def test_dropping_keeps_the_first_rows_for_each_device(expert_ids, most):
    ids = jnp.asarray(expert_ids, jnp.int32)
    for devices in (1, 2, 4, 8):
        kept = first_of_each_device(ids, E, devices, most)
        assert kept.tolist() == kept_by_hand(expert_ids, devices, most)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("expert4", "equal"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("expert4", "chunks"),
                ("expert4_tensor2", "ragged"),
                ("expert2x2_reversed", "least_loaded"),
                ("expert1", "equal"),
            )
        ),
    ],
)
def test_tokens_that_move_first_equal_a_loop_over_experts(layout, name):
    check(on_mesh(layout, CONFIGS[name], moves_tokens=True), ROUTINGS)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("expert4_tensor2", "ragged"),
        ("expert4", "chunks"),
        pytest.param("expert4", "equal", marks=pytest.mark.slow),
    ],
)
def test_dropped_rows_contribute_nothing(layout, name):
    """Equal to a batch without these assignments; every one is counted."""
    sizes, axes = LAYOUTS[layout]
    config = AllToAllDroppingConfig(
        capacity_factor=1.0,
        num_chunks=CONFIGS[name].num_chunks,
        transport=CONFIGS[name].transport,
    )
    x, weights, cotangent = tensors()
    run = with_gradients(on_mesh(layout, config), cotangent)
    # Devices of expert_tensor share tokens; each chunk of them has its own buffers.
    tensor = sizes.get("etp", 1)
    parts = sizes["expert"] * config.num_chunks
    for routing in ROUTINGS:
        expert_ids, gates = routed(routing)
        chunks = expert_ids.reshape(parts, -1)
        most = math.ceil(chunks.shape[1] / sizes["expert"])
        kept = np.array([kept_by_hand(chunk, sizes["expert"], most) for chunk in chunks])
        kept = kept.reshape(T, K)
        (y, dropped), gradients = run(x, gates, weights, expert_ids)
        (y_wanted, _), gradients_wanted = wanted()(x, gates, weights, kept)
        assert_close((y, gradients), (y_wanted, gradients_wanted), "matmul")
        lost = expert_ids != kept
        assert lost.any() or routing in ("even", "empty_slots")
        assert not np.asarray(gradients[1])[lost].any()  # of their gates: exactly 0
        counted = np.bincount(expert_ids[lost], minlength=E)
        assert np.asarray(dropped).sum(0).tolist() == counted.tolist()
        assert dropped.shape == (sizes["expert"] * tensor, E)


def run_exchange(kind, expert_ids):
    """On 4 devices, of labelled rows: what arrives [4 R 2], group sizes [4 e], what returns."""
    mesh, axes = mesh_of("expert2x2")
    tokens = PartitionSpec(axes.expert)

    @jax.jit
    def run(rows, expert_ids):
        def local(rows, expert_ids):
            sent = exchange(
                rows, rows[:, :1], expert_ids, num_experts=E, most=6, axes=axes, transport=kind
            )
            return sent.rows, sent.group_sizes, sent.undo(sent.rows), sent.gates

        return jax.shard_map(local, mesh=mesh, in_specs=(tokens, tokens), out_specs=tokens)(
            rows, expert_ids
        )

    slots = jnp.arange(4 * 6, dtype=jnp.float32)
    rows = jnp.stack([slots, expert_ids.astype(jnp.float32)], 1)
    arrived, group_sizes, returned, gates = run(rows, expert_ids)
    assert np.array_equal(gates, arrived[:, 0])
    return rows, arrived.reshape(4, -1, 2), group_sizes.reshape(4, -1), returned


@pytest.mark.parametrize("kind", ["equal", "ragged"])
def test_rows_arrive_sorted_and_return(kind):
    """Sorted by expert, then sender, then slot; each sender receives its own rows back."""
    random = np.random.default_rng(5)
    for ids in (random.integers(0, E + 1, 24), np.full(24, 5), np.full(24, E), np.arange(24) % E):
        rows, arrived, group_sizes, returned = run_exchange(kind, jnp.asarray(ids, jnp.int32))
        for device in range(4):
            experts_held = (2 * device, 2 * device + 1)
            slots = [slot for expert in experts_held for slot in np.flatnonzero(ids == expert)]
            assert group_sizes[device].tolist() == [(ids == e).sum() for e in experts_held]
            assert arrived[device, : len(slots), 0].tolist() == slots
        wanted = np.where((ids < E)[:, None], np.asarray(rows), 0)
        assert np.array_equal(returned, wanted)


def test_gradient_of_move_rows_is_a_gather():
    """Equal to the gradient that JAX derives, but a gather."""
    sources, targets = jnp.asarray([2, 4, 0], jnp.int32), jnp.asarray([2, 3, 0, 3], jnp.int32)
    rows = jax.random.normal(jax.random.key(0), (4, 2))
    weight = jax.random.normal(jax.random.key(1), (3, 2))

    def loss(rows, move):
        return jnp.sum(weight * move(rows) ** 2)

    def ours(rows):
        return move_rows(rows, sources, targets)

    def theirs(rows):
        return rows.at[sources].get(mode="fill", fill_value=0)

    assert ours(rows)[1].tolist() == [0, 0]
    gradients = [jax.grad(loss)(rows, move) for move in (ours, theirs)]
    assert_close(*gradients, "elementwise")
    text = jax.jit(jax.grad(partial(loss, move=ours))).lower(rows).as_text()
    assert "scatter" not in text
    assert "scatter" in jax.jit(jax.grad(partial(loss, move=theirs))).lower(rows).as_text()


def test_emulated_ragged_all_to_all_equals_the_documented_example():
    """The example of `jax.lax.ragged_all_to_all`, on two devices."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    arguments = (
        jnp.asarray([1, 2, 2, 3, 4, 0], jnp.float32)[:, None],
        jnp.zeros((8, 1)),
        *(jnp.asarray(ints, jnp.int32) for ints in ([0, 1, 0, 1], [1, 2, 1, 1])),
        *(jnp.asarray(ints, jnp.int32) for ints in ([0, 0, 1, 2], [1, 1, 2, 1])),
    )
    plain = partial(ragged.ragged_all_to_all, axis_name="a")
    spread = PartitionSpec("a")
    run = jax.jit(jax.shard_map(plain, mesh=mesh, in_specs=(spread,) * 6, out_specs=spread))
    assert run(*arguments)[:, 0].tolist() == [1, 3, 0, 0, 2, 2, 4, 0]
    arguments = (*arguments[:5], arguments[5] + 1)  # sizes that disagree
    assert np.isnan(run(*arguments)).all()


def bytes_by_formula(layout, name, *, moves_tokens=False):
    """Return the larger of operand and result bytes of each collective, by kind.

    From the docstrings of the backends, times 4 bytes.
    """
    sizes, config = LAYOUTS[layout][0], CONFIGS[name]
    number = getattr(config, "num_chunks", 1)
    experts, tensor = sizes["expert"], sizes.get("etp", 1)
    tokens = T // (experts * tensor) // number
    shared = experts * tensor if config.traits.gathers_tokens else tensor
    found = {"all-gather": [], "reduce-scatter": [], "all-to-all": [], "ragged-all-to-all": []}
    if shared > 1:  # tokens, gates, ids; the gradient of the sums
        together = shared * tokens
        found["all-gather"] += [together * n for n in (D, K, K, D)]
        found["reduce-scatter"] += [together * n for n in (D, D, K)]  # sums; gradients of x, gates
    if not config.traits.gathers_tokens:
        together = tokens * tensor
        most = min(together * K, together * E // experts)
        if isinstance(config, AllToAllDroppingConfig):
            most = min(most, math.ceil(config.capacity_factor * together * K / experts))
        found["all-gather"].append(experts * E)
        kind = "ragged-all-to-all" if config.transport == "ragged" else "all-to-all"
        again = [] if config.keeps_rows else [D]
        found[kind] += [experts * most * n for n in (D, D, D, D, *again, 1, 1)]  # rows; gates
    found = {kind: each * number for kind, each in found.items()}
    if moves_tokens:  # tokens and sums, experts with gates; their gradients
        all_tokens = T // (experts * tensor)
        found["all-to-all"] += [all_tokens * n for n in (D, D, D, D, 2 * K, 2 * K)]
    return {kind: sorted(4 * n for n in each) for kind, each in found.items() if each}


@pytest.mark.parametrize(
    ("layout", "name", "moves_tokens"),
    [
        *(
            ("expert4", name, False)
            for name in ("all_gather", "equal", "sent_again", "ragged", "chunks", "tight")
        ),
        *(("expert4_tensor2", name, False) for name in ("all_gather", "equal", "ragged", "chunks")),
        ("expert4", "chunks", True),
        ("expert4_tensor2", "equal", True),
    ],
)
def test_collectives_are_those_of_the_formulas(layout, name, moves_tokens, monkeypatch):
    monkeypatch.setitem(CONFIGS, "tight", AllToAllDroppingConfig(capacity_factor=0.5))
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", RAGGED)  # it can be lowered, not run
    x, weights, cotangent = tensors()
    expert_ids, gates = routed("even")
    function = on_mesh(layout, CONFIGS[name], moves_tokens=moves_tokens)
    run = with_gradients(function, cotangent)
    text = run.lower(x, gates, weights, expert_ids).as_text("hlo")
    found = {}
    for one in collectives(text):
        found.setdefault(one.kind, []).append(max(one.operand_bytes, one.result_bytes))
    wanted = bytes_by_formula(layout, name, moves_tokens=moves_tokens)
    assert {kind: sorted(each) for kind, each in found.items()} == wanted


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: AllToAllDroppingConfig(capacity_factor=0.0),
            r"execution\.dispatcher\.capacity_factor=0\.0 must be a positive number",
        ),
        (
            lambda: AllToAllDroppingConfig(capacity_factor=float("nan")),
            r"capacity_factor=nan must be a positive number: .* choose all_to_all",
        ),
        (
            lambda: AllToAllConfig(num_chunks=0),
            r"execution\.dispatcher\.num_chunks=0 must be at least 1",
        ),
        (
            lambda: run_shapes("expert2", AllToAllConfig(num_chunks=3)),
            r"num_chunks=3 must divide the tokens of a device \(4\)",
        ),
        (
            lambda: run_shapes("expert2", AllToAllConfig(num_chunks=2), order=np.arange(12)),
            "cuts assignments by token, and this router gives them by expert: set it to 1",
        ),
        (
            lambda: run_shapes("expert2", AllToAllConfig(), order=np.arange(12), moves_tokens=True),
            "with this router experts choose tokens: leave token_tables out",
        ),
        (
            lambda: run_shapes("expert3", AllToAllConfig()),
            r"model\.moe\.num_experts=8 must be divisible by the 3 devices of the expert axes",
        ),
    ],
)
def test_refused_in_words(make, words, monkeypatch):
    monkeypatch.setitem(LAYOUTS, "expert3", ({"expert": 3}, ExpertAxes(expert=("expert",))))
    with pytest.raises(ValueError, match=words):
        make()


def run_shapes(layout, config, *, order=None, moves_tokens=False):
    """Trace a call without computing."""
    num_tokens = 24 if layout == "expert3" else T
    weights = {"gate_up": jnp.zeros((9, D, 2, F)), "down": jnp.zeros((9, F, D))}
    weights = weights if layout == "expert3" else tensors()[1]
    given = (jnp.zeros((num_tokens, D)), jnp.zeros((num_tokens, K)), weights)
    return jax.eval_shape(
        on_mesh(layout, config, order=order, moves_tokens=moves_tokens),
        *given,
        jnp.zeros((num_tokens, K), jnp.int32),
    )


def test_transport_follows_the_platform_of_the_mesh(monkeypatch):
    """The mesh states the platform, so that a plan may be for another machine."""
    assert CHOOSE().transport == CHOOSE("equal").transport == "equal"
    assert "does not exist on cpu" in CHOOSE().reason
    with pytest.raises(ValueError, match=r"transport='ragged' does not exist on cpu: set it to"):
        CHOOSE("ragged")
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((2,), ("expert",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert CHOOSE().transport == CHOOSE("ragged").transport == "ragged"
        assert CHOOSE("equal").transport == "equal"
