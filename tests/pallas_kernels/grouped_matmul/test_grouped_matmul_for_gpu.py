# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests grouped_matmul and grouped_swiglu on GPUs: interpreted kernels, choice of kernel, lowering.

    JAX_PLATFORMS=cuda,cpu pytest -n 0 -m accelerator tests/pallas_kernels   on a GPU

The interpreter of Mosaic GPU models every warpgroup, barrier and copy, and takes seconds per
program: its cases are few and small, and most of them slow.

To add a pair of factors or a pattern of groups: `tests/support/conformance.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped_matmul, grouped_swiglu, quantize
from pallas_kernels.gpu import hopper_parts
from pallas_kernels.gpu.hopper_parts import SHARED
from pallas_kernels.grouped_matmul import products, reference
from pallas_kernels.grouped_matmul.gpu import hopper as pallas_gpu_hopper
from pallas_kernels.grouped_matmul.gpu import kernels as pallas_gpu
from pallas_kernels.grouped_matmul.gpu import triton as pallas_gpu_triton
from pallas_kernels.grouped_matmul.gpu.hopper_tiles import (
    COLUMNS,
    reason_against,
    section_of,
    tiles_for,
)
from pallas_kernels.grouped_matmul.gpu.schedule import row_tiles
from pallas_kernels.grouped_swiglu import gpu as swiglu_gpu
from pallas_kernels.grouped_swiglu import reference as swiglu_reference
from tests.support import conformance, gpus
from tests.support.conformance import (
    GROUPED_PAIRS,
    OUTER_PAIRS,
    SIZES,
    Dims,
    check_exact_grouped,
    check_exact_outer,
    check_grouped,
    check_outer,
    operand,
)
from tests.support.gpus import interpreted_gpu
from tests.support.tolerances import assert_close

pytestmark = gpus.triton_may_go


def _interpreted(module, interpret):
    return products.Products(
        functools.partial(module.multiply, interpret=interpret),
        functools.partial(module.contract, interpret=interpret),
    )


TRITON = _interpreted(pallas_gpu_triton, True)
HOPPER = _interpreted(pallas_gpu_hopper, interpreted_gpu(detect_races=True))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Shrink tiles so that few rows have several."""
    small = pallas_gpu_triton._ProductBlocks(32, 32, 32)
    monkeypatch.setattr(pallas_gpu_triton, "_block_sizes", lambda *_: small)


def _matmul(ours):
    def multiply(rows, weights, group_sizes, *, out_dtype):
        return products.grouped_matmul(rows, weights, group_sizes, jnp.dtype(out_dtype), ours)

    return multiply


def _slow_but(pairs, *fast):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in pairs]


# Tiles of 32 rows: off by one, one row alone, one hot, none.
FEW_ROWS = Dims(R=100, k=256, n=40, G=4)
FEW_SIZES = {
    "off_by_one": (31, 33, 32, 1),
    "one_row": (0, 0, 1, 0),
    "skewed": (7, 0, 80, 3),
    "empty": (0, 0, 0, 0),
}


def _integers(pairs):
    return [name for name, pair in pairs.items() if all(factor.is_integer for factor in pair)]


@pytest.mark.parametrize(
    "pair",
    _slow_but([x for x in GROUPED_PAIRS if x not in _integers(GROUPED_PAIRS)], "w4a16_block"),
)
def test_triton(pair):
    check_grouped(_matmul(TRITON), GROUPED_PAIRS[pair], FEW_ROWS, FEW_SIZES)


@pytest.mark.parametrize("pair", _slow_but(_integers(GROUPED_PAIRS)))
def test_triton_is_exact(pair):
    check_exact_grouped(_matmul(TRITON), GROUPED_PAIRS[pair], FEW_ROWS, FEW_SIZES)


@pytest.mark.parametrize("pair", _slow_but(OUTER_PAIRS))
def test_triton_outer(pair):
    check_outer(TRITON.contract, OUTER_PAIRS[pair], FEW_ROWS, FEW_SIZES)
    if pair in _integers(OUTER_PAIRS):
        check_exact_outer(TRITON.contract, OUTER_PAIRS[pair], FEW_ROWS, FEW_SIZES)


@pytest.mark.slow
def test_triton_in_every_pattern():
    check_grouped(_matmul(TRITON), GROUPED_PAIRS["float32"], Dims(R=600, k=32, n=24, G=4), SIZES)


# Tiles of 128 rows, for programs that go through several; the last one slides back.
HOPPER_DIMS = Dims(R=205, k=256, n=40, G=3)
HOPPER_SIZES = {"misaligned": (131, 0, 66)}
HOPPER_PAIRS = tuple(name for name in GROUPED_PAIRS if name != "float32")


@pytest.fixture
def one_poison(monkeypatch):
    """Use one poison: the interpreter compiles a kernel again for every call."""
    monkeypatch.setattr(conformance, "POISONS", {"nan": np.nan})


@pytest.fixture
def watched(one_poison, capfd):
    """Assert that no race is reported."""
    yield
    assert "RACE" not in "".join(capfd.readouterr())


def test_hopper(watched):
    """Rows of two groups in one tile, rows past them, partial copies."""
    rows = jax.random.normal(jax.random.key(0), (136, 64), jnp.bfloat16).at[133:].set(jnp.nan)
    weights = jax.random.normal(jax.random.key(1), (2, 64, 64), jnp.bfloat16)
    sizes, dtype = jnp.array([3, 130]), jnp.dtype("bfloat16")
    out = HOPPER.multiply(rows, weights, sizes, is_turned=False, out_dtype=dtype)
    expected = reference.grouped_matmul(rows, weights, sizes, dtype)
    assert_close(out, expected, "matmul", "bfloat16")
    assert not np.any(np.asarray(out[133:], np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", ["bfloat16", "w8a16_channel", "w4a16_block", "e4m3_channel", "e5m2_e4m3"]
)
def test_hopper_pairs(pair, watched):
    check_grouped(_matmul(HOPPER), GROUPED_PAIRS[pair], HOPPER_DIMS, HOPPER_SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["w8a8_channel", "w8a8_block", "w4a8_block"])
def test_hopper_is_exact(pair, watched):
    check_exact_grouped(_matmul(HOPPER), GROUPED_PAIRS[pair], HOPPER_DIMS, {"hot": (7, 0, 198)})


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["off_by_one_of_128", "one_row"])
def test_hopper_patterns(pattern, watched):
    dims, sizes = Dims(R=600, k=128, n=64, G=4), {pattern: SIZES[pattern]}
    check_exact_grouped(_matmul(HOPPER), GROUPED_PAIRS["w8a8_tensor"], dims, sizes)
    check_outer(HOPPER.contract, OUTER_PAIRS["e5m2_e4m3"], dims, sizes)


@functools.partial(jax.jit, static_argnums=0)
def _schedule(tile, sizes):
    return row_tiles(ROWS, sizes, tile)


ROWS = 320


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, ROWS), min_size=5, max_size=5).map(sorted),
    tile=st.sampled_from([32, 64]),
)
def test_every_row_is_in_one_tile(cuts, tile):
    """Tiles cover all rows once, begin where TMA may, and end within the rows."""
    sizes = np.diff([0, *cuts]).astype(np.int32)
    tiles, count = _schedule(tile, sizes)
    assert count[0] <= tiles.shape[0]
    owner = np.full(ROWS, -1)
    for group, first, low, high in np.asarray(tiles)[: int(count[0])]:
        assert first % 8 == 0 and 0 <= first <= ROWS - tile
        assert 0 <= low < high <= tile
        assert np.all(owner[first + low : first + high] == -1)
        owner[first + low : first + high] = group
    expected = np.repeat(np.arange(6), [*sizes, ROWS - sizes.sum()])
    np.testing.assert_array_equal(owner, expected)


def test_sizes_above_the_rows_are_cut():
    tiles, count = row_tiles(64, jnp.array([40, 50], jnp.int32), 32)
    own = sum(high - low for _, _, low, high in np.asarray(tiles)[: int(count[0])])
    assert own == 64


@pytest.mark.parametrize("width", [64, 192, 320, 704, 768, 1024, 1408, 2048, 14336])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_tiles_fit(width, dtype):
    tiles = tiles_for(width, dtype)
    assert tiles.columns * tiles.num_columns == width
    assert tiles.num_columns % tiles.panel == 0
    staged = 48 * 1024
    assert tiles.stages >= 3 and tiles.stages * (128 + tiles.columns) * 128 + staged <= SHARED


def test_models_have_wide_tiles():
    """OLMoE and Qwen3-30B, forward and transposed."""
    assert all(tiles_for(width, "bfloat16").columns == COLUMNS[0] for width in (1024, 768, 2048))


@pytest.mark.parametrize(
    ("steps", "blocks", "dtype", "section"),
    [
        (32, 0, "bfloat16", 32),
        (32, 8, "bfloat16", 4),
        (16, 1, "int8", 16),
        (16, 1, "float8_e4m3fn", 4),
        (6, 1, "float8_e4m3fn", 3),
        (16, 16, "float8_e4m3fn", 1),
    ],
)
def test_sections(steps, blocks, dtype, section):
    assert section_of(steps, blocks, jnp.dtype(dtype)) == section


@pytest.mark.parametrize(
    ("capability", "rows", "weights", "options", "kernel", "reason"),
    [
        ((9, 0), "bfloat16", "bfloat16", {}, "hopper", "9.0 has WGMMA and TMA"),
        ((9, 0), "float16", "int8", {"block_size": 32}, "triton", "32 are no multiple of 64"),
        ((9, 0), "int8", "int8", {"block_size": 128}, "hopper", "9.0 has WGMMA and TMA"),
        ((9, 0), "int8", "int8", {"block_size": 64}, "hopper", "9.0 has WGMMA and TMA"),
        ((9, 0), "int8", "int8", {"block_size": 320}, "triton", "too long to sum in bfloat16"),
        ((9, 0), "int8", "int8", {"is_contraction": True}, "triton", "exact in Triton alone"),
        ((9, 0), "float8_e4m3fn", "float8_e4m3fn", {}, "hopper", "9.0 has WGMMA and TMA"),
        ((9, 0), "float32", "float32", {}, "triton", "16 and 8 bits, not float32"),
        ((8, 0), "bfloat16", "bfloat16", {}, "triton", "8.0 has no WGMMA"),
        ((10, 0), "bfloat16", "bfloat16", {}, "triton", "which only 9.0 has"),
    ],
)
def test_kernel_choice(capability, rows, weights, options, kernel, reason):
    choice = pallas_gpu.kernel_for(capability, rows, weights, **options)
    assert choice.kernel == kernel
    assert reason in choice.reason


def test_unsupported_gpu_or_dtype_is_refused():
    with pytest.raises(ValueError, match=r"compute capability 8.0 or later, this is 7.5: ch"):
        pallas_gpu.kernel_for((7, 5), "bfloat16", "bfloat16")
    with pytest.raises(ValueError, match="this is no NVIDIA GPU: choose 'xla'"):
        pallas_gpu.kernel_for(None, "bfloat16", "bfloat16")
    with pytest.raises(ValueError, match="no kernel of 'pallas_gpu' multiplies float64: cast"):
        pallas_gpu.kernel_for((9, 0), "float64", "float64")
    rows = jnp.zeros((5, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="'pallas_gpu' need a gpu, and this program is for a cpu"):
        pallas_gpu.contract(rows, rows, jnp.array([5]), out_dtype=jnp.float32)
    assert reason_against("float32", "float32", None, is_contraction=True) is not None


def _described(kind):
    return AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "cuda"))


def _lower(function, kind, *shapes):
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    with jax.sharding.use_abstract_mesh(_described(kind)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


MOSAIC_CALL = "custom_call @mosaic_gpu"
TRITON_CALL = "custom_call @__gpu$xla.gpu.triton"


def _both(rows, weights, group_sizes, d_out):
    def product(rows, weights):
        return grouped_matmul(rows, weights, group_sizes, implementation="pallas_gpu")

    out, pull = jax.vjp(product, rows, weights)
    return out, pull(d_out)


@pytest.mark.parametrize(
    ("kind", "dtype", "mosaic", "triton"),
    [
        ("NVIDIA H200", "bfloat16", 3, 0),
        pytest.param("NVIDIA H200", "float16", 3, 0, marks=pytest.mark.slow),
        pytest.param("NVIDIA H200", "float32", 0, 3, marks=pytest.mark.slow),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 0, 3),
    ],
)
def test_lowered_for_a_gpu(kind, dtype, mosaic, triton, monkeypatch):
    """OLMoE gets three kernels of its GPU family, and no array as large as G x R."""
    monkeypatch.undo()  # the default tiles
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)
    shapes = shape((65536, 2048)), shape((64, 2048, 1024)), sizes, shape((65536, 1024))
    text = _lower(_both, kind, *shapes)
    assert text.count(MOSAIC_CALL) == mosaic
    assert text.count(TRITON_CALL) == triton
    assert "64x65536x" not in text


@pytest.mark.slow
@pytest.mark.parametrize("pair", HOPPER_PAIRS)
def test_pairs_lowered_for_hopper(pair):
    def product(rows, weights, sizes):
        return grouped_matmul(rows, weights, sizes, implementation="pallas_gpu")

    first, second = GROUPED_PAIRS[pair]

    def make():
        keys = jax.random.split(jax.random.key(0))
        return operand(keys[0], (1024, 512), first, -1), operand(keys[1], (4, 512, 256), second, -2)

    shapes = jax.eval_shape(make)
    text = _lower(product, "NVIDIA H200", *shapes, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert text.count(MOSAIC_CALL) == 1


@pytest.mark.slow
def test_lowered_in_shard_map():
    """Results of kernels vary over the mesh, as check_vma requires."""
    device = AbstractDevice("NVIDIA H200", None, "cuda")
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)

    def loss(rows, weights):
        sizes = jnp.full((4,), 64, jnp.int32)
        out = grouped_matmul(rows, weights, sizes, implementation="pallas_gpu")
        return jax.lax.psum(out.astype(jnp.float32).sum(), "data")

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for kind, call in (("bfloat16", MOSAIC_CALL), ("float32", TRITON_CALL)):
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=kind)
        grad = jax.shard_map(
            jax.grad(loss, (0, 1)), mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P())
        )
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(grad).trace(shape((2048, 128)), shape((4, 128, 64)))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count(call) == 2


def _spilling(self, x, out, place, some=None):
    """Fault: write all rows of a tile."""
    del some
    return WHOLE(self, x, out, place)


WHOLE = hopper_parts.Stores.put


@pytest.mark.slow
def test_a_wrong_hopper_kernel_is_caught(monkeypatch, one_poison):
    monkeypatch.setattr(hopper_parts.Stores, "put", _spilling)
    multiply = functools.partial(HOPPER.multiply, is_turned=False)
    dims, sizes = Dims(R=140, k=64, n=64, G=2), {"misaligned": (3, 130)}
    with pytest.raises(AssertionError, match="misaligned"):
        check_grouped(multiply, GROUPED_PAIRS["w8a8_tensor"], dims, sizes)


def test_a_wrong_triton_kernel_is_caught(monkeypatch):
    """Giving the first row of a group to the group before fails."""

    def off_by_one(num_rows, group_sizes, tile):
        moved = group_sizes.at[0].add(1).at[1].add(-1)
        return row_tiles(num_rows, moved, tile)

    monkeypatch.setattr(pallas_gpu_triton, "row_tiles", off_by_one)
    multiply = functools.partial(TRITON.multiply, is_turned=False)
    with pytest.raises(AssertionError, match="off_by_one"):
        check_grouped(
            multiply, GROUPED_PAIRS["w8a8_tensor"], FEW_ROWS, {"off_by_one": (31, 33, 32, 1)}
        )


@pytest.mark.slow
@gpus.sees_races
def test_a_planted_race_is_seen(monkeypatch, capfd):
    """The race detector reports a planted race."""
    gpus.plant_a_race(monkeypatch)
    rows = jnp.ones((256, 512), jnp.bfloat16)
    weights = jnp.ones((1, 512, 64), jnp.bfloat16)
    try:
        out = HOPPER.multiply(
            rows, weights, jnp.array([256]), is_turned=False, out_dtype=jnp.dtype("float32")
        )
        jax.block_until_ready(out)
        said = "".join(capfd.readouterr())
    except jax.errors.JaxRuntimeError as error:  # from JAX 0.12 on
        said = str(error)
    assert "RACE" in said


def _expert_inputs(dtype="float32", dims=(60, 40, 24), sizes=(31, 0, 20)):
    num_rows, k, n = dims
    keys = jax.random.split(jax.random.key(0), 4)
    rows = jax.random.normal(keys[0], (num_rows, k)).at[sum(sizes) :].set(jnp.nan)
    gate_up = 0.2 * jax.random.normal(keys[1], (len(sizes), k, 2, n))
    down = 0.2 * jax.random.normal(keys[2], (len(sizes), n, k))
    d_out = jax.random.normal(keys[3], (num_rows, k)).at[sum(sizes) :].set(jnp.inf)
    arrays = (x.astype(dtype) for x in (rows, gate_up, down, d_out))
    return (*arrays, jnp.array(sizes, jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("has_factors", [False, True])
def test_swiglu(is_quantised, has_factors):
    """Value and gradients of SwiGLU composed of the products."""
    rows, gate_up, down, d_out, sizes = _expert_inputs()
    if is_quantised:
        gate_up, down = quantize(gate_up, "int8", axis=-3), quantize(down, "int8", axis=-2)
    floating = (rows,) if is_quantised else (rows, gate_up, down)
    factors = (jnp.linspace(0.0, 1.0, rows.shape[0]),) if has_factors else ()

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, *floating):
        def apply(floating, factors):
            weights = (gate_up, down) if is_quantised else ()
            return function(*floating, *weights, sizes, *factors)

        out, pull = jax.vjp(apply, floating, factors)
        return out, pull(d_out)

    ours = run(functools.partial(swiglu_gpu.grouped_swiglu, products=TRITON), *floating)
    assert_close(ours, run(swiglu_reference.grouped_swiglu, *floating), "matmul")


def test_swiglu_lowered():
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    shapes = shape((4096, 2048)), shape((8, 2048, 2, 1024)), shape((8, 1024, 2048))

    def loss(rows, gate_up, down, sizes):
        out = grouped_swiglu(rows, gate_up, down, sizes, implementation="pallas_gpu")
        return out.astype(jnp.float32).sum()

    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    text = _lower(jax.grad(loss, (0, 1, 2)), "NVIDIA H200", *shapes, sizes)
    # z, the sum of the loss needs no product of its own; d h, d rows, and two matrices.
    assert text.count(MOSAIC_CALL) == 5


REAL = {
    "olmoe": (65536, 2048, 1024, 64, None),
    "qwen3": (65536, 2048, 768, 128, None),
    "skewed": (65536, 2048, 1024, 64, 0.7),
    "decoding": (32, 2048, 1024, 64, None),
    "odd": (1001, 200, 136, 5, 0.5),
}


@pytest.mark.accelerator
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["chosen", "triton"])
@pytest.mark.parametrize("name", REAL)
def test_on_a_gpu(name, family, dtype, monkeypatch):
    """Compiled kernels agree with float32 in XLA, one group at a time, in value and gradients."""
    if jax.default_backend() != "gpu":
        pytest.skip("these kernels are for GPUs")
    monkeypatch.undo()  # the default tiles
    num_rows, k, n, groups, hot = REAL[name]
    rng = np.random.default_rng(0)
    used = num_rows - num_rows // 50
    shares = rng.dirichlet(np.full(groups, 50.0)) * (1.0 if hot is None else 1.0 - hot)
    shares[0] += 0.0 if hot is None else hot
    sizes = np.floor(shares * used).astype(np.int32)
    sizes[-1] = 0
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (num_rows, k)).astype(dtype)
    weights = jax.random.normal(keys[1], (groups, k, n)).astype(dtype) * k**-0.5
    d_out = jax.random.normal(keys[2], (num_rows, n)).astype(dtype)
    past = jnp.arange(num_rows)[:, None] >= sizes.sum()
    rows, d_out = (jnp.where(past, jnp.nan, x).astype(dtype) for x in (rows, d_out))
    ours = pallas_gpu.PRODUCTS if family == "chosen" else pallas_gpu_triton.PRODUCTS
    multiply = functools.partial(_matmul(ours), out_dtype=dtype)
    out, pull = jax.vjp(lambda x, w: multiply(x, w, jnp.array(sizes)), rows, weights)
    d_rows, d_weights = pull(d_out)
    out = jnp.asarray(out)
    start = 0
    for group, size in enumerate(sizes):
        own = slice(start, start + size)
        start += size
        if group % max(1, groups // 8) and size:
            continue  # some of them are enough
        with jax.default_matmul_precision("highest"):
            x, w, d = (a.astype(jnp.float32) for a in (rows[own], weights[group], d_out[own]))
            expected = x @ w, d @ w.T, x.T @ d
        for ours_, theirs in zip((out[own], d_rows[own], d_weights[group]), expected, strict=True):
            scale = max(1.0, float(jnp.abs(theirs).max(initial=0.0)))
            error = float(jnp.abs(ours_.astype(jnp.float32) - theirs).max(initial=0.0))
            # One rounding of the result, relative to the largest; sums in another order.
            assert error <= scale * (1e-2 if dtype != "float32" else 1e-4), group
    assert not np.any(np.asarray(out[start:], np.float32))
    assert not np.any(np.asarray(d_rows[start:], np.float32))
