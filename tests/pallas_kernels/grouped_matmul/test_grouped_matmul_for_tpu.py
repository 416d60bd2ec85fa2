# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests grouped_matmul, grouped_outer and grouped_swiglu on TPUs.

Every pair of factors is compared with numpy (tests/support/conformance.py) with small tiles, so
that few rows make many visits; visits with plain loops. Also the machine interpreter, a manual
region over eight devices, faulty kernels, and compilation for described TPUs.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import QuantizedArray, grouped_matmul, grouped_outer, grouped_swiglu, quantize
from pallas_kernels.grouped_matmul.tpu import blocks, multiply, visits
from pallas_kernels.grouped_matmul.tpu.blocks import Bytes, Tile
from pallas_kernels.interpreter import interpret_kernels
from tests.support import conformance
from tests.support.conformance import GROUPED_PAIRS, OUTER_PAIRS, Dims
from tests.support.tolerances import assert_close
from tests.support.tpus import described_tpus

SMALL = Tile(16, 16, 16)
DIMS = Dims(R=75, k=64, n=24, G=4)
SIZES = {
    "empty": (0, 0, 0, 0),
    "middle_hot": (0, 66, 0, 0),
    "skewed": (3, 0, 43, 1),
    "off_by_one": (15, 17, 16, 1),
    "full": (8, 23, 0, 44),
}


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles of 16 rows, in pieces of 8, and sums in parts of 16."""
    for kernel in blocks.TABLE[""]:
        monkeypatch.setitem(blocks.TABLE[""], kernel, SMALL)
    monkeypatch.setattr(blocks, "LANES", 8)
    monkeypatch.setattr(blocks, "PIECE", 8)
    monkeypatch.setattr(multiply, "PIECE", 8)


@pytest.fixture
def values():
    """Run the TPU kernels in the plain interpreter."""
    with interpret_kernels("values"):
        yield


MATMUL = functools.partial(grouped_matmul, implementation="pallas_tpu")
OUTER = functools.partial(grouped_outer, implementation="pallas_tpu")


def _with_few_blocks(factor):
    """Return the factor with blocks of which these sizes have several."""
    if not isinstance(factor.scales, int) or factor.dtype == "mxfp8":
        return factor
    return factor._replace(scales={128: 32, 64: 16}[factor.scales])


FAST = ("w4a8_block", "w4a16_block")  # float32 is in test_swiglu


@pytest.mark.usefixtures("small_tiles", "values")
@pytest.mark.parametrize(
    "pair",
    [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in GROUPED_PAIRS],
)
def test_pairs(pair):
    """Value and gradients with empty groups, off-by-one sizes, NaN and infinity past the end."""
    left, right = map(_with_few_blocks, GROUPED_PAIRS[pair])
    factors = (left, right)
    conformance.check_grouped(MATMUL, factors, DIMS, SIZES)
    if all(factor.is_integer for factor in factors):
        conformance.check_exact_grouped(MATMUL, factors, DIMS, SIZES)


@pytest.mark.usefixtures("small_tiles", "values")
@pytest.mark.parametrize(
    "pair", [pytest.param(x, marks=pytest.mark.slow) for x in OUTER_PAIRS if x != "w8a8_tensor"]
)
def test_outer(pair):
    conformance.check_outer(OUTER, OUTER_PAIRS[pair], DIMS, SIZES)


@pytest.mark.usefixtures("small_tiles", "values")
def test_outer_of_integers_is_exact():
    conformance.check_exact_outer(OUTER, OUTER_PAIRS["w8a8_tensor"], DIMS, SIZES)


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.usefixtures("values")
@pytest.mark.parametrize("pair", ["bfloat16", "w4a8_block", "w4a16_block", "mxfp8"])
def test_pairs_with_the_tiles_of_a_tpu(pair):
    conformance.check_grouped(MATMUL, GROUPED_PAIRS[pair])


@functools.partial(jax.jit, static_argnums=(1, 2))
def _both_plans(sizes, num_rows, tile):
    return visits.visit_rows(sizes, num_rows, tile), visits.visit_groups(sizes, num_rows, tile)


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 20) | st.just(0), min_size=5, max_size=5),
    # Fewer rows than groups, one tile, many tiles, the last of them partial.
    shape=st.sampled_from([(3, 8), (40, 64), (50, 7), (48, 16)]),
)
def test_visits(sizes, shape):
    """Every row meets its group once, in consecutive tiles; every group has a visit."""
    num_rows, tile = shape
    ends = np.minimum(np.cumsum(sizes), num_rows)
    owners = np.searchsorted(ends, np.arange(num_rows), side="right")
    number = -(-num_rows // tile)
    plans = jax.tree.map(np.asarray, _both_plans(jnp.array(sizes, jnp.int32), *shape))
    for group, read, write, low, high in plans:
        seen = np.full(num_rows, len(sizes))
        for g, at, a, b in zip(group, write, low, high, strict=True):
            rows = np.arange(at * tile + a, at * tile + b)
            assert np.all(seen[rows] == len(sizes)) or a >= b
            seen[rows] = g
        np.testing.assert_array_equal(seen, owners)
        assert np.all(np.diff(group) >= 0) and np.all(np.diff(write) >= 0)
        assert np.all((read >= 0) & (read < number)) and np.all(write < number)
        assert np.all((read == write) | (low >= high))
    assert set(plans[0][2]) == set(range(number))  # all rows are written
    assert set(plans[1][0]) == set(range(len(sizes)))  # and all groups
    past = plans[0][1][plans[0][3] >= plans[0][4]]
    assert np.all(past <= max(0, (ends[-1] - 1) // tile))  # rows out of range are not read


@given(
    rows=st.integers(1, 70000),
    out=st.integers(1, 20000),
    summed=st.integers(1, 20000),
    itemsize=st.sampled_from([1, 2, 4]),
)
def test_tiles_fit(rows, out, summed, itemsize):
    each = Bytes(2 * itemsize, 2 * itemsize, 2 * itemsize + 8)
    for kernel in ("multiply", "contract"):
        tile = blocks.blocks_for(kernel, rows, out, summed, each=each)
        assert tile.rows in (rows, tile.rows // blocks.PIECE * blocks.PIECE)
        assert tile.rows <= rows and tile.out <= out
        assert tile.out == out or tile.out % blocks.LANES == 0
        assert tile.summed == summed or tile.summed % blocks.LANES == 0
        assert kernel == "contract" or summed % tile.summed == 0
        if summed % blocks.LANES == 0:
            assert blocks.tile_bytes(kernel, tile, each) <= blocks.budget()


def _swiglu_inputs(num_rows=75, sizes=(3, 0, 43, 1), width=24, hidden=20, dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 4)
    rows = jax.random.normal(keys[0], (num_rows, width)).at[sum(sizes) :].set(jnp.nan)
    gate_up = 0.5 * jax.random.normal(keys[1], (len(sizes), width, 2, hidden))
    down = 0.5 * jax.random.normal(keys[2], (len(sizes), hidden, width))
    d_out = jax.random.normal(keys[3], (num_rows, width)).at[sum(sizes) :].set(jnp.inf)
    arrays = [x.astype(dtype) for x in (rows, gate_up, down, d_out)]
    return (*arrays[:3], jnp.array(sizes, jnp.int32), arrays[3])


def _swiglu_gradients(
    rows, gate_up, down, group_sizes, d_out, implementation, is_gathered=False, factors=None
):
    def apply(rows, gate_up, down, factors):
        own = (gate_up[:, :, 0], gate_up[:, :, 1]) if is_gathered else gate_up
        return grouped_swiglu(
            rows,
            own,
            down,
            group_sizes,
            factors,
            down_is_turned=is_gathered,
            implementation=implementation,
        )

    out, pull = jax.vjp(apply, rows, gate_up, down, factors)
    gradients = pull(d_out)
    return out, *(gradients if factors is not None else gradients[:3])


def _factors(num_rows=75, seen=1000):
    """Factors of rows, one of them 0; those past the groups must not be read."""
    factors = jax.random.normal(jax.random.key(7), (num_rows,)).at[1].set(0.0)
    return factors.at[seen:].set(jnp.nan)


_compiled = functools.partial(jax.jit, static_argnames="implementation")


@pytest.mark.usefixtures("small_tiles", "values")
@pytest.mark.parametrize("is_gathered", [False, True], ids=["whole", "in_halves_and_turned"])
def test_swiglu(is_gathered):
    """One compiled function serves all sizes; weights as one device has them, or as gathered."""
    functions = [
        jax.jit(functools.partial(_swiglu_gradients, implementation=name, is_gathered=is_gathered))
        for name in ("pallas_tpu", "reference")
    ]
    for name, sizes in SIZES.items():
        inputs = _swiglu_inputs(sizes=sizes)
        actual, expected = (function(*inputs) for function in functions)
        assert_close(actual, expected, "matmul")
        for x in actual[:2]:
            assert not np.any(x[sum(sizes) :]), f"{name}: past the last group"


@pytest.mark.usefixtures("small_tiles", "values")
@pytest.mark.parametrize("is_gathered", [False, True], ids=["whole", "in_halves_and_turned"])
def test_swiglu_with_factors_of_rows(is_gathered):
    """A factor of 0 has a gradient."""
    sizes = SIZES["skewed"]
    inputs = _swiglu_inputs(sizes=sizes)
    run = functools.partial(_swiglu_gradients, *inputs, is_gathered=is_gathered)
    actual, expected = (
        jax.jit(functools.partial(run, implementation=name))(factors=_factors(seen=sum(sizes)))
        for name in ("pallas_tpu", "reference")
    )
    assert_close(actual, expected, "matmul")
    assert not np.any(actual[4][sum(sizes) :]) and np.all(actual[4][: sum(sizes)])


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("has_factors", [False, True])
def test_swiglu_without_gradient(has_factors):
    inputs = (*_swiglu_inputs()[:4], _factors() if has_factors else None)
    with interpret_kernels("values"):
        actual = jax.jit(functools.partial(grouped_swiglu, implementation="pallas_tpu"))(*inputs)
    expected = grouped_swiglu(*inputs, implementation="reference")
    assert_close(actual, expected, "matmul")


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_swiglu_in_bfloat16():
    """z is kept in bfloat16, h is made from float32 sums."""
    inputs = _swiglu_inputs(dtype="bfloat16")
    with interpret_kernels("values"):
        actual = _compiled(_swiglu_gradients)(*inputs, implementation="pallas_tpu")
    expected = _compiled(_swiglu_gradients)(*inputs, implementation="reference")
    assert {x.dtype for x in actual} == {jnp.dtype(jnp.bfloat16)}
    assert_close(actual, expected, "matmul", "bfloat16")


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("operation", ["matmul", "swiglu"])
def test_in_the_machine(operation):
    """With a TPU's memories: unwritten reads are NaN, out-of-bounds accesses raise."""
    rows, gate_up, down, group_sizes, d_out = _swiglu_inputs()

    def run(implementation):
        if operation == "swiglu":
            return _compiled(_swiglu_gradients)(
                rows, gate_up, down, group_sizes, d_out, implementation=implementation
            )

        @jax.jit
        def both(rows, weights, d_out):
            apply = functools.partial(
                grouped_matmul, group_sizes=group_sizes, implementation=implementation
            )
            out, pull = jax.vjp(apply, rows, weights)
            return out, *pull(d_out)

        return both(rows, gate_up[:, :, 0], d_out[:, :20])

    with interpret_kernels("machine"):
        actual = run("pallas_tpu")
    assert_close(actual, run("reference"), "matmul")


@pytest.mark.large
@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_in_shard_map():
    """With rows over eight devices and weights on each, gradients are sums over devices."""
    parts = [_swiglu_inputs(20, s) for s in ((9, 0, 11), (20, 0, 0), (0, 0, 0), (1, 5, 7)) * 2]
    _, gate_up, down, *_ = parts[0]
    rows, group_sizes, d_out = (jnp.concatenate([part[i] for part in parts]) for i in (0, 3, 4))
    mesh = jax.make_mesh((8,), ("tokens",), axis_types=(AxisType.Auto,))

    def run(implementation):
        apply = jax.shard_map(
            lambda *arrays: grouped_swiglu(*arrays, implementation=implementation),
            mesh=mesh,
            in_specs=(P("tokens"), P(), P(), P("tokens")),
            out_specs=P("tokens"),
        )

        @jax.jit
        def both(rows, gate_up, down, d_out):
            out, pull = jax.vjp(lambda *x: apply(*x, group_sizes), rows, gate_up, down)
            return out, *pull(d_out)

        with jax.set_mesh(mesh):
            return both(rows, gate_up, down, d_out)

    with interpret_kernels("machine"):
        actual = run("pallas_tpu")
    assert_close(actual, run("reference"), "matmul")


def _without_first_row(plan):
    """Fault: visits that begin inside a tile skip a row."""

    def wrong(*args):
        planned = plan(*args)
        return planned._replace(low=jnp.where(planned.low > 0, planned.low + 1, planned.low))

    return wrong


@pytest.mark.usefixtures("small_tiles", "values")
def test_a_wrong_kernel_is_caught(monkeypatch):
    monkeypatch.setattr(multiply, "visit_rows", _without_first_row(visits.visit_rows))
    sizes = {"skewed": SIZES["skewed"]}
    with pytest.raises(AssertionError, match="skewed, nan: value"):
        conformance.check_grouped(MATMUL, GROUPED_PAIRS["w8a8_channel"], DIMS, sizes)


def test_blocks_that_cannot_be_unpacked():
    weights = quantize(jnp.ones((2, 24, 16)), "int8", axis=-2, block_size=12)
    with (
        interpret_kernels("values"),
        pytest.raises(ValueError, match="block_size=16, or with one scale"),
    ):
        grouped_matmul(jnp.ones((8, 24)), weights, jnp.array([4, 4]), implementation="pallas_tpu")


@contextlib.contextmanager
def _on_one_tpu():
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def test_lowered_for_a_tpu():
    """A TPU runs the kernels by default; libtpu is not needed."""
    shapes = [(1000, 256), (4, 256, 2, 128), (4, 128, 256)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def loss(rows, gate_up, down, group_sizes):
        out = grouped_swiglu(rows, gate_up, down, group_sizes)
        return jnp.sum(out.astype(jnp.float32))

    with _on_one_tpu():
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        traced = step.trace(*arrays, jax.ShapeDtypeStruct((4,), jnp.int32))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    # z, d_hidden, d_rows, d_in, d_out; the last product has no part in the gradients, and JAX 0.12
    # leaves it out.
    assert text.count("stablehlo.custom_call @tpu_custom_call") in (5, 6)


MODELS = {"olmoe": (65536, 64, 2048, 1024), "qwen3_30b": (65536, 128, 2048, 768)}
"""Rows of 8192 tokens and 8 experts each, experts, width, hidden width."""


@pytest.fixture(params=["v5e:2x2", "v5p:2x2x1"])
def one_tpu(monkeypatch, request):
    """Return a mesh of one described device."""
    devices = described_tpus(monkeypatch, request.param)
    return Mesh(np.array(devices[:1]), ("x",), (AxisType.Auto,))


def _compile(mesh, function, *arrays):
    here = NamedSharding(mesh, P())
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arrays)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*arrays).compile()


def _like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_swiglu_compiled_for_a_tpu(one_tpu, model):
    """Forward and backward fit into a core's memory, and keep only z and h."""
    num_rows, groups, width, hidden = MODELS[model]

    def step(rows, gate_up, down, group_sizes, d_out):
        return _swiglu_gradients(rows, gate_up, down, group_sizes, d_out, None)

    compiled = _compile(
        one_tpu,
        step,
        _like(num_rows, width),
        _like(groups, width, 2, hidden),
        _like(groups, hidden, width),
        _like(groups, dtype=jnp.int32),
        _like(num_rows, width),
    )
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    for name in ("in", "out", "d_hidden", "d_rows", "d_in", "d_out"):
        assert f"grouped_swiglu_{name}" in text
    # z, dz and h in bfloat16, and both orders of W_in and of its gradient.
    rows, matrices = num_rows * hidden * 2 * 5, groups * width * 2 * hidden * 2 * 2
    assert memory.temp_size_in_bytes < 1.05 * (rows + matrices)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_products_compiled_for_a_tpu(one_tpu, model):
    """No temporary beside operands and results."""
    num_rows, groups, width, hidden = MODELS[model]

    def step(rows, weights, group_sizes, d_out):
        out, pull = jax.vjp(lambda r, w: grouped_matmul(r, w, group_sizes), rows, weights)
        return out, *pull(d_out)

    weights = _like(groups, width, hidden)
    sizes, d_out = _like(groups, dtype=jnp.int32), _like(num_rows, hidden)
    compiled = _compile(one_tpu, step, _like(num_rows, width), weights, sizes, d_out)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", ["w8a8_channel", "w4a8_block", "w4a16_block", "e5m2_e4m3", "mxfp8"]
)
def test_quantised_products_compiled_for_a_tpu(one_tpu, pair):
    """Includes the transposed product, where rows are floating."""
    num_rows, groups, width, hidden = 4096, 16, 2048, 768
    pair = GROUPED_PAIRS[pair]
    shapes = (((num_rows, width), pair[0], -1), ((groups, width, hidden), pair[1], -2))
    rows, weights = (
        jax.eval_shape(lambda key, case=case: conformance.operand(key, *case), jax.random.key(0))
        for case in shapes
    )

    def step(rows, weights, group_sizes, d_out):
        if isinstance(rows, QuantizedArray):
            return grouped_matmul(rows, weights, group_sizes)
        out, pull = jax.vjp(lambda r: grouped_matmul(r, weights, group_sizes), rows)
        return out, *pull(d_out)

    sizes, d_out = _like(groups, dtype=jnp.int32), _like(num_rows, hidden)
    text = _compile(one_tpu, step, rows, weights, sizes, d_out).as_text()
    assert text is not None and "grouped_matmul" in text
