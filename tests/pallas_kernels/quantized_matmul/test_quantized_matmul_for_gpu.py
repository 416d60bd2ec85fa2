# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests quantized_matmul on GPUs: interpreted kernels, the choice of kernel, lowering.

    JAX_PLATFORMS=cuda,cpu pytest -n 0 -m accelerator tests/pallas_kernels   on a GPU

The interpreter of Mosaic GPU models every warpgroup, barrier and copy, and takes seconds per
program: its cases are few and small, and most of them slow.

To add a pair of factors: `tests/support/conformance.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import QuantizedArray, quantize, quantize_mixed, quantized_matmul
from pallas_kernels.gpu.hopper_parts import COMPUTING, SHARED
from pallas_kernels.quantized_matmul import api
from pallas_kernels.quantized_matmul.gpu import kernels as pallas_gpu
from pallas_kernels.quantized_matmul.gpu import scales as pallas_gpu_scales
from pallas_kernels.quantized_matmul.gpu import tiles as pallas_gpu_tiles
from pallas_kernels.quantized_matmul.gpu.kernels import kernel_for
from pallas_kernels.quantized_matmul.gpu.tiles import (
    STEP,
    QuantizedTiles,
    is_widened,
    tiles_few_bits,
    tiles_widened,
)
from tests.support import conformance, gpus
from tests.support.conformance import PAIRS, Dims, Factor
from tests.support.gpus import interpreted_gpu

pytestmark = gpus.triton_may_go


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Use two programs that share k: the interpreter takes seconds for each."""
    monkeypatch.setattr(pallas_gpu_tiles, "_splits", lambda _, sections, __: min(2, sections))


def _interpreted(kernel, interpret=None, **options):
    """Return `quantized_matmul` with this kernel, gradients included."""
    if interpret is None:
        interpret = True if kernel == "triton" else interpreted_gpu()
    run = functools.partial(pallas_gpu.run, kernel, interpret=interpret, **options)
    return lambda x, w, out_dtype: api._differentiable(x, w, out_dtype, run)


FLOATING = ("bfloat16", "float16", "float32")


def _stored(x: Any, dtype: Any, axis: int, block: Any = None) -> Any:
    """Return the factor, floating or in few bits."""
    if dtype in FLOATING:
        return x.astype(dtype)
    return quantize(x, dtype, axis=axis, block_size=block if isinstance(block, int) else None)


QUANTISED = [name for name, pair in PAIRS.items() if pair[1].scales is not None]
INTEGERS = [name for name in QUANTISED if all(factor.is_integer for factor in PAIRS[name])]


def _but(names, fast):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("pair", _but(QUANTISED, ("mxfp8", "w4a32_block")))
def test_triton_conforms(pair):
    conformance.check_product(_interpreted("triton"), PAIRS[pair])


@pytest.mark.parametrize("pair", _but(INTEGERS, ("w8a8_mixed",)))
def test_triton_sums_integers_exactly(pair):
    conformance.check_exact_product(_interpreted("triton"), PAIRS[pair])


@pytest.mark.slow
@pytest.mark.parametrize("pair", ("e4m3_channel", "mxfp8_a16"))
def test_triton_where_float8_cannot_be_read(pair):
    conformance.check_product(_interpreted("triton", has_float8=False), PAIRS[pair])


@pytest.mark.slow
@pytest.mark.parametrize("pair", ("w8a16_tensor", "w4a16_block", "e5m2_e4m3"))
def test_widened_conforms(pair):
    conformance.check_product(_interpreted("widened"), PAIRS[pair], Dims(R=20))


@pytest.mark.parametrize(
    "pair", _but(("w4a8_block", "w8a8_channel", "w8a8_mixed"), ("w4a8_block",))
)
def test_widened_sums_integers_exactly(pair):
    dims = Dims(R=5, k=128 if pair == "w4a8_block" else 512, n=40)
    conformance.check_exact_product(_interpreted("widened"), PAIRS[pair], dims)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ("e4m3_channel", "e4m3_block"))
def test_few_bits_conforms(pair):
    conformance.check_product(_interpreted("few_bits"), PAIRS[pair])


@pytest.mark.slow
@pytest.mark.parametrize("pair", ("w8a8_tensor", "w4a8_channel"))
def test_few_bits_sums_integers_exactly(pair):
    conformance.check_exact_product(_interpreted("few_bits"), PAIRS[pair], Dims(R=130))


def _operands(pair, dims, key=0):
    keys = jax.random.split(jax.random.key(key))
    return (
        conformance.operand(keys[0], (dims.R, dims.k), pair[0], -1),
        conformance.operand(keys[1], (dims.k, dims.n), pair[1], -2),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ("widened", "triton"))
def test_narrow_results(kernel):
    """A float16 x, float16 results, and sizes that fill no tile."""
    dims, pair = Dims(R=9, k=72, n=130), (Factor("float16"), Factor("int8", "channel"))
    x, w = _operands(pair, dims)
    out = jax.jit(functools.partial(_interpreted(kernel), out_dtype=jnp.dtype("float16")))(x, w)
    assert out.dtype == jnp.float16
    expected = conformance.numbers(x) @ conformance.numbers(w)
    conformance.assert_near(out, expected, float(jnp.finfo("float16").eps), "value")


# Rings that are filled again, with one program for all of k, watched for races.
WATCHED = {
    "widened": ((Factor("int8", 128), Factor("int4", 128)), Dims(R=5, k=640, n=128)),
    "few_bits": ((Factor("int8", 128), Factor("int4", 128)), Dims(R=5, k=896)),
    "few_bits, whole": ((Factor("int8", "tensor"), Factor("int8", "tensor")), Dims(R=5, k=896)),
}


def _watched(name, monkeypatch):
    monkeypatch.setattr(pallas_gpu_tiles, "_splits", lambda *_: 1)
    pair, dims = WATCHED[name]
    multiply = _interpreted(name.split(",")[0], interpreted_gpu(detect_races=True))
    x, w = _operands(pair, dims, key=1)
    out = jax.block_until_ready(jax.jit(functools.partial(multiply, out_dtype=jnp.float32))(x, w))
    return out, conformance.numbers(x) @ conformance.numbers(w), conformance.bound_of(pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", WATCHED)
def test_hopper_has_no_races(name, monkeypatch, capfd):
    out, expected, bound = _watched(name, monkeypatch)
    conformance.assert_near(out, expected, bound, "value")
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
@gpus.sees_races
def test_a_planted_race_is_seen(monkeypatch, capfd):
    """The race detector reports a planted race."""
    gpus.plant_a_race(monkeypatch)
    try:
        _watched("few_bits", monkeypatch)
        said = "".join(capfd.readouterr())
    except jax.errors.JaxRuntimeError as error:  # from JAX 0.12 on
        said = str(error)
    assert "RACE" in said


@pytest.mark.parametrize("kernel", _but(("triton", "few_bits"), ("triton",)))
def test_a_wrong_kernel_is_caught(kernel, monkeypatch):
    """Using the scales of the next block fails."""
    table = pallas_gpu_scales._table

    def shifted(*arguments):
        found = table(*arguments)
        return None if found is None else jnp.roll(found, 1, axis=0)

    monkeypatch.setattr(pallas_gpu_scales, "_table", shifted)
    with pytest.raises(AssertionError, match="value: error"):
        conformance.check_product(_interpreted(kernel), PAIRS["w8a8_block"], Dims(R=5))


# Section B2 of the notes: relative Frobenius error of normal numbers, by how both are stored.
BOUNDS = {
    "w8a8": (Factor("int8", "channel"), Factor("int8", "channel"), 0.02),
    "w4a8": (Factor("int8", 128), Factor("int4", 128), 0.15),
    "w4a4": (Factor("int4", 128), Factor("int4", 128), 0.2),
    "e4m3": (Factor("float8_e4m3fn", "channel"), Factor("float8_e4m3fn", "channel"), 0.05),
    "mxfp8": (Factor("mxfp8", 32), Factor("mxfp8", 32), 0.05),
}


@pytest.mark.parametrize("name", _but(BOUNDS, ("w4a8",)))
def test_rounding_error_is_bounded(name):
    first, second, bound = BOUNDS[name]
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(64, 256)] * 2))
    w = w.T
    narrow = [
        _stored(a, factor.dtype, axis, factor.scales)
        for a, factor, axis in ((x, first, -1), (w, second, -2))
    ]
    out = _interpreted("triton")(narrow[0], narrow[1], jnp.dtype("float32"))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert np.linalg.norm(out - exact) <= bound * np.linalg.norm(exact)


# The choice.


def _shaped(m, k, n, x, w, x_block=None, w_block=None):
    """Return shapes of x [m k] and w [k n]."""

    return jax.eval_shape(
        lambda: (
            _stored(jnp.zeros((m, k)), x, -1, x_block),
            _stored(jnp.zeros((k, n)), w, -2, w_block),
        )
    )


HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("capability", "factors", "kernel", "reason"),
    [
        (HOPPER, (16, 256, 128, "bfloat16", "int4", None, 128), "widened", "reading w takes the t"),
        (HOPPER, (4096, 256, 128, "float16", "int8"), "widened", "9.0 has WGMMA"),
        (HOPPER, (128, 256, 128, "int8", "int4", 128, 128), "widened", "9.0 has WGMMA"),
        (HOPPER, (129, 256, 128, "int8", "int4", 128, 128), "few_bits", "multiplying takes the"),
        (HOPPER, (129, 256, 128, "int8", "int4", 128, 64), "widened", "9.0 has WGMMA"),
        (HOPPER, (8, 1024, 128, "int8", "int8", 512, 512), "few_bits", "9.0 has WGMMA"),
        (HOPPER, (199, 256, 128, "float8_e4m3fn", "float8_e4m3fn"), "few_bits", "9.0 has WGMMA"),
        (HOPPER, (99, 256, 128, "float8_e5m2", "float8_e4m3fn"), "widened", "9.0 has WGMMA"),
        (HOPPER, (99, 256, 128, "mxfp8", "mxfp8"), "triton", "blocks of 32 are no multiple of 64"),
        (HOPPER, (99, 256, 128, "float32", "int8"), "triton", "bfloat16 and float16, not float32"),
        (AMPERE, (99, 256, 128, "bfloat16", "int8"), "triton", "8.0 has no WGMMA"),
        ((10, 0), (99, 256, 128, "int8", "int8"), "triton", "10.0 has no WGMMA, which only 9.0"),
    ],
)
def test_kernel_choice(capability, factors, kernel, reason):
    choice = kernel_for(capability, *_shaped(*factors))
    assert choice.kernel == kernel
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("capability", "factors", "message"),
    [
        ((7, 5), (8, 256, 128, "int8", "int8"), "compute capability 8.0 or later, this is 7.5"),
        (None, (8, 256, 128, "int8", "int8"), "this is no NVIDIA GPU: choose 'xla'"),
        (HOPPER, (8, 240, 128, "int8", "int8", 48, 48), "not of 48: quantize with block_size=64, "),
        (HOPPER, (8, 160, 128, "int8", "int8", 40, 40), "block_size=32 or 64, or choose 'xla'"),
    ],
)
def test_unsupported_factors_are_refused(capability, factors, message):
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        kernel_for(capability, *_shaped(*factors))


def test_without_gpu_pallas_gpu_is_refused():
    w = quantize(jnp.ones((32, 8)), "int8", axis=-2)
    with pytest.raises(ValueError, match="'pallas_gpu' needs? a gpu"):
        quantized_matmul(jnp.ones((4, 32)), w, implementation="pallas_gpu")


@pytest.mark.parametrize("w", ("int8", "int4"))
@pytest.mark.parametrize("block", (None, 64, 128, 512))
def test_hopper_tiles_fit_shared_memory(w, block, monkeypatch):
    """Every size has memory for a ring of several slots, registers, and covers k exactly once."""
    monkeypatch.undo()
    bits = 4 if w == "int4" else 8
    for exact in (None, 256 if w == "int8" else 4096):
        for m in (1, 5, 16, 40, 64, 65, 200, 4096):
            for n in (128, 256, 384, 4096):
                for k in (512, 1536, 4096 + 512):
                    tiles = tiles_widened(m, n, k, bits, block, exact)
                    assert _shared(tiles, bits) <= SHARED and tiles.stages >= 4
                    assert tiles.rows % 8 == 0 and tiles.rows * -(-m // tiles.rows) - m < 8 * (
                        -(-m // tiles.rows)
                    )
                    is_whole = tiles.section == 1 and block is None and exact is None
                    assert tiles.rows <= (128 if is_whole else 64)
                    sections, left = divmod(k // STEP, tiles.section)
                    each = -(-sections // tiles.splits)
                    assert left == 0 and 0 < sections - each * (tiles.splits - 1) <= each
                    assert block is None or tiles.section * STEP == block


@pytest.mark.parametrize("block", (None, 128, 512))
@pytest.mark.parametrize("out_bytes", (2, 4))
def test_few_bits_tiles_fit_shared_memory(block, out_bytes):
    for m in (1, 500, 4096):
        for n in (128, 384, 4096):
            tiles = tiles_few_bits(m, n, block, out_bytes)
            slot = (tiles.rows + tiles.columns) * (128 + 4)
            assert tiles.stages * slot + COMPUTING * 2 * 64 * 64 * out_bytes <= SHARED
            assert tiles.stages >= 3 and n % tiles.columns == 0


def _shared(tiles: QuantizedTiles, bits: int) -> int:
    own = COMPUTING * tiles.columns
    slot = STEP * own * bits // 8 + STEP * tiles.rows * 2 + 4 * (own + tiles.rows)
    return tiles.stages * slot + 2 * STEP * own * 2


# Lowering.


def _described(kind):
    return AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "cuda"))


def _lowered(kind, *factors, out_dtype=jnp.bfloat16):
    multiply = functools.partial(quantized_matmul, implementation="pallas_gpu", out_dtype=out_dtype)
    with jax.sharding.use_abstract_mesh(_described(kind)):
        traced = jax.jit(multiply).trace(*_shaped(*factors))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


MOSAIC_CALL = "custom_call @mosaic_gpu"
TRITON_CALL = "custom_call @__gpu$xla.gpu.triton"


@pytest.mark.parametrize(
    ("kind", "factors", "mosaic"),
    [
        ("NVIDIA H200", (16, 4096, 14336, "bfloat16", "int4", None, 128), True),
        ("NVIDIA H200", (16, 4096, 384, "bfloat16", "float8_e4m3fn"), True),
        ("NVIDIA H200", (4096, 4096, 4096, "float16", "int8"), True),
        ("NVIDIA H200", (32, 4096, 4096, "int8", "int4", 128, 128), True),
        ("NVIDIA H200", (32, 4096, 4096, "int8", "int8"), True),
        ("NVIDIA H200", (4096, 4096, 4096, "float8_e4m3fn", "float8_e4m3fn"), True),
        ("NVIDIA H200", (4096, 4096, 4096, "int8", "int4", 128, 128), True),
        ("NVIDIA H200", (99, 1001, 1001, "int8", "int8"), True),
        ("NVIDIA H200", (4096, 4096, 4096, "mxfp8", "mxfp8"), False),
        ("NVIDIA H200", (16, 4096, 4096, "float32", "int4", None, 128), False),
        ("NVIDIA A100-SXM4-80GB", (16, 4096, 4096, "bfloat16", "int4", None, 128), False),
        ("NVIDIA A100-SXM4-80GB", (99, 1001, 1001, "float8_e5m2", "float8_e4m3fn"), False),
        ("NVIDIA B200", (4096, 4096, 4096, "int8", "int8"), False),
    ],
)
def test_lowered_for_a_gpu(kind, factors, mosaic):
    """The GPU gets one kernel of its family; few rows read w without a transpose."""
    text = _lowered(kind, *factors)
    assert text.count(MOSAIC_CALL) == (1 if mosaic else 0)
    assert text.count(TRITON_CALL) == (0 if mosaic else 1)
    x, w = _shaped(*factors)
    if mosaic and is_widened(x, w) and w.shape[1] % 128 == 0:
        width = {"int4": "i4", "int8": "i8", "float8_e4m3fn": "f8E4M3FN"}[w.values.dtype.name]
        (call,) = [line for line in text.splitlines() if MOSAIC_CALL in line]
        assert f"tensor<{w.shape[0]}x{w.shape[1]}x{width}>" in call
        large = f"tensor<{w.shape[0]}x{w.shape[1]}xbf16>"
        assert large not in text or x.shape[0] == w.shape[0]


@pytest.mark.parametrize("rows", (16, 1000))
def test_mixed_blocks_are_lowered_as_their_weights(rows):
    """Blocks of 4 and 8 bits are one kernel that reads 4-bit weights."""
    x, weights = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, 512), (512, 256)))
    mix = functools.partial(quantize_mixed, num_wide=1)
    mixed = jax.eval_shape(mix, weights, jax.ShapeDtypeStruct((64, 512), jnp.bfloat16))
    multiply = functools.partial(quantized_matmul, implementation="pallas_gpu")
    with jax.sharding.use_abstract_mesh(_described("NVIDIA H200")):
        text = jax.jit(multiply).trace(x, mixed).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if MOSAIC_CALL in line]
    assert ("tensor<512x256xi4>" in call) == (rows == 16)
    assert ("tensor<256x512xi8>" in call) == (rows == 1000)


def test_lowered_in_shard_map():
    """Results of kernels vary over the mesh, as check_vma requires."""
    device = AbstractDevice("NVIDIA H200", None, "cuda")
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    x, w = _shaped(64, 256, 128, "bfloat16", "int8")

    def loss(x, w):
        out = quantized_matmul(x, w, implementation="pallas_gpu")
        return jax.lax.psum(out.astype(jnp.float32).sum(), "data")

    grad = jax.shard_map(
        jax.value_and_grad(loss), mesh=mesh, in_specs=(P("data"), P()), out_specs=(P(), P("data"))
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(grad).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(MOSAIC_CALL) == 1


REAL = {
    "w4a16": (16, 4096, 4096, "bfloat16", "int4", None, 128),
    "w8a16": (1, 4096, 14336, "bfloat16", "int8"),
    "w8a16_many": (1024, 2048, 1536, "bfloat16", "int8"),
    "w4a16_many": (1000, 2048, 1536, "bfloat16", "int4", None, 128),
    "fp8_weights": (8, 2048, 384, "float16", "float8_e4m3fn"),
    "w4a8": (32, 4096, 4096, "int8", "int4", 128, 128),
    "w8a8": (32, 4096, 4096, "int8", "int8"),
    "w4a8_many": (2048, 4096, 2048, "int8", "int4", 128, 128),
    "w8a8_many": (2048, 4096, 2048, "int8", "int8"),
    "fp8": (2048, 4096, 2048, "float8_e4m3fn", "float8_e4m3fn"),
    "fp8_blocks": (2048, 4096, 2048, "float8_e4m3fn", "float8_e4m3fn", 128, 128),
    "fp8_wide": (512, 1024, 1024, "float8_e5m2", "float8_e5m2"),
    "mixed_kinds": (100, 1024, 1024, "float8_e5m2", "float8_e4m3fn"),
    "odd": (77, 1001, 1003, "int8", "int4"),
    "mxfp8": (300, 1024, 512, "mxfp8", "mxfp8"),
    "float32": (20, 1024, 512, "float32", "int4", None, 64),
}


@pytest.mark.accelerator
@pytest.mark.parametrize("family", ("chosen", "triton"))
@pytest.mark.parametrize("name", REAL)
def test_on_a_gpu(name, family, monkeypatch):
    """Compiled kernels agree with float64 over the same values."""
    monkeypatch.undo()  # the default splits
    if jax.default_backend() != "gpu":
        pytest.skip("these kernels are for GPUs")
    m, k, n, x_kind, w_kind, *blocks = REAL[name]
    x, w = (jax.random.normal(jax.random.key(i), size) for i, size in enumerate([(m, k), (k, n)]))
    x = _stored(x, x_kind, -1, *blocks[:1])
    w = _stored(w, w_kind, -2, *blocks[1:])
    if family == "chosen":
        multiply = functools.partial(quantized_matmul, implementation="pallas_gpu")
    else:
        multiply = functools.partial(pallas_gpu.run, "triton")
    out = jax.jit(functools.partial(multiply, out_dtype=jnp.float32))(x, w)
    expected = conformance.numbers(x) @ conformance.numbers(w)
    # float8 is summed with 14 bits or so before it is moved.
    bound = 3e-3 if "fp8" in name or "float8" in x_kind else 1e-5
    conformance.assert_near(out, expected, bound, name)


@pytest.mark.accelerator
@pytest.mark.parametrize("rows", (8, 200))
@pytest.mark.parametrize("w", ("int8", "int4"))
@pytest.mark.parametrize("family", ("chosen", "triton"))
def test_the_largest_integers_on_a_gpu(family, w, rows):
    """Sums far beyond the integers of float32 are exact on tensor cores."""
    if jax.default_backend() != "gpu":
        pytest.skip("these kernels are for GPUs")
    k, n = 4096, 256
    largest = {"int8": 127, "int4": 7}[w]
    values = jnp.full((rows, k), 127, jnp.int8), jnp.full((k, n), largest, w)
    factors = [QuantizedArray(values=a, scales=jnp.ones((1, 1)), axis=None) for a in values]
    if family == "chosen":
        multiply = functools.partial(quantized_matmul, implementation="pallas_gpu")
    else:
        multiply = functools.partial(pallas_gpu.run, "triton", out_dtype=jnp.float32)
    out = jax.jit(multiply)(*factors)
    np.testing.assert_array_equal(out, np.full((rows, n), np.float32(k * 127 * largest)))
