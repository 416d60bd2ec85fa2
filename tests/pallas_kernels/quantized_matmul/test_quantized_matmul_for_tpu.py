# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests quantized_matmul on TPUs: interpreted kernels, and compilation for described TPUs.

Operands come from `quantize`, so that kernel and reference multiply the same values and differ only
by rounding of float32 sums.
"""

import contextlib
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import QuantizedArray, quantize, quantize_mixed, quantized_matmul
from pallas_kernels.interpreter import interpret_kernels
from pallas_kernels.quantized_matmul.tpu import kernels as pallas_tpu
from pallas_kernels.quantized_matmul.tpu import layout as pallas_tpu_layout
from tests.support import conformance
from tests.support.tolerances import assert_close
from tests.support.tpus import described_tpus

# Several tiles of small operands.
SMALL = (("m", 128), ("k", 128), ("n", 128))
# A format is (dtype, block size) or the name of a floating dtype.
PAIRS = {
    "w8a8": (("int8", None), ("int8", None)),
    "w4a8 blocks": (("int8", 64), ("int4", 128)),
    "w4a4": (("int4", 32), ("int4", None)),
    "fp8": (("float8_e4m3fn", None), ("float8_e4m3fn", 128)),
    "mxfp8": (("mxfp8", None), ("mxfp8", None)),
    "w4a16": ("bfloat16", ("int4", 128)),
    "w8a32": ("float32", ("int8", None)),
    "w8a16 mx": ("bfloat16", ("mxfp8", None)),
}


def _factor(a, form, axis):
    if isinstance(form, str):
        return a.astype(form)
    dtype, block = form
    return quantize(a, dtype, axis=axis, block_size=block)


def _factors(key, m, k, n, pair):
    keys = jax.random.split(key)
    x, w = jax.random.normal(keys[0], (m, k)), jax.random.normal(keys[1], (k, n))
    return _factor(x, pair[0], -1), _factor(w, pair[1], -2)


@contextlib.contextmanager
def _tiles(sizes, is_turned):
    """Replace the rule for tile sizes of one pass, or of both (None), by sizes that fit."""
    rule = pallas_tpu_layout._rule

    def forced(layout, fits):
        if not sizes or is_turned not in (None, layout.is_turned):
            return rule(layout, fits)
        found = {**rule(layout, fits), **sizes}
        assert fits(found), (layout, found)
        return found

    with mock.patch.object(pallas_tpu_layout, "_rule", forced):
        yield


@functools.partial(jax.jit, static_argnums=(0, 3))
def _product(implementation, x, w, tiles=()):
    with _tiles(dict(tiles), is_turned=False):
        return quantized_matmul(x, w, implementation=implementation, out_dtype=jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _gradient(implementation, x, w, d_out, tiles=()):
    def run(x):
        return quantized_matmul(x, w, implementation=implementation, out_dtype=jnp.float32)

    with _tiles(dict(tiles), is_turned=True):
        return jax.vjp(run, x)[1](d_out)[0]


def _assert_product(x, w, interpreter="values"):
    with interpret_kernels(interpreter):
        out = _product("pallas_tpu", x, w, SMALL)
    assert_close(out, _product("reference", x, w), "matmul")


# The others are in the conformance table, and take part in its slow run.
FEW = ("w4a8 blocks", "w4a4", "mxfp8", "w4a16")


@pytest.mark.parametrize("pair", FEW)
def test_values(key, pair):
    """Three tiles of k, two of n of which the second is cut."""
    _assert_product(*_factors(key, 5, 384, 150, PAIRS[pair]))


@pytest.mark.parametrize(
    ("m", "k", "n", "pair"),
    [
        # Blocks that are no whole registers: 40 of the common divisor, 96, 1152 = 3 * 384.
        (3, 200, 7, (("int8", 40), ("int4", 200))),
        pytest.param(33, 96, 17, ("bfloat16", ("int8", 96)), marks=pytest.mark.slow),
        pytest.param(2, 2304, 30, (("int8", 2304), ("int4", 1152)), marks=pytest.mark.slow),
        # k of no block, cut and filled; one row, one column; many rows of which some are filled.
        (1, 130, 1, (("float8_e5m2", 65), ("float8_e5m2", None))),
        pytest.param(200, 100, 3, (("int8", None), ("int8", None)), marks=pytest.mark.slow),
    ],
)
def test_any_size(key, m, k, n, pair):
    x, w = _factors(key, m, k, n, pair)
    with interpret_kernels("values"):
        out = _product("pallas_tpu", x, w)
    assert_close(out, _product("reference", x, w), "matmul")


@pytest.mark.parametrize(("kind", "w_dtype"), [("TPU v5 lite", "int8"), ("TPU7x", "int4")])
def test_integers_are_exact(monkeypatch, kind, w_dtype):
    """Compare with int64, with sums beyond float32, with and without an integer MXU."""
    monkeypatch.setattr(pallas_tpu_layout, "device_kind", lambda: kind)
    random = np.random.default_rng(0)
    x = random.integers(120, 128, (3, 2500))
    w = random.integers(5, 8, (2500, 9)) if w_dtype == "int4" else x[:1].T * np.ones(9, int)
    factors = (
        QuantizedArray(values=jnp.asarray(a, dtype), scales=jnp.ones((1, 1)), axis=None)
        for a, dtype in ((x, "int8"), (w, w_dtype))
    )
    with interpret_kernels("values"):
        out = jax.jit(functools.partial(quantized_matmul, implementation="pallas_tpu"))(*factors)
    exact = x @ w
    assert w_dtype == "int4" or exact.max() > 2**24
    np.testing.assert_array_equal(np.asarray(out), exact.astype(np.float32))


def _mixed(key, num_wide):
    """Return x with an outlier channel, and w with so many wide blocks of six."""
    keys = jax.random.split(key)
    x = jax.random.normal(keys[0], (5, 768)).at[:, 3].mul(50.0)
    w = jax.random.normal(keys[1], (768, 150))
    return x, quantize_mixed(w, x, num_wide=num_wide)


@pytest.mark.parametrize(
    ("num_wide", "tile"),
    # The border within a tile, none wide, all wide.
    [(3, 256)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 256), (6, 384), (1, 768))],
)
def test_mixed_blocks(key, num_wide, tile):
    x, w = _mixed(key, num_wide)
    with interpret_kernels("values"):
        out = _product("pallas_tpu", x, w, (("k", tile),))
    assert_close(out, _product("reference", x, w), "matmul")


def test_a_wide_block_taken_for_narrow_is_caught(key, monkeypatch):
    """Casting eight bits to four wraps."""
    monkeypatch.setattr(pallas_tpu, "_in_runs", lambda add, step, layout: add(0))
    x, w = _mixed(key, 3)
    jax.clear_caches()
    with interpret_kernels("values"):
        out = _product("pallas_tpu", x, w, (("k", 256),))
    jax.clear_caches()
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_close(out, _product("reference", x, w), "matmul")


@pytest.mark.parametrize(
    "pair", ["w4a16", *(pytest.param(p, marks=pytest.mark.slow) for p in ("w8a32", "w8a16 mx"))]
)
def test_gradient(key, pair):
    """Gradient of x; d out is as wide as two tiles, and rounded to the dtype of x."""
    x, w = _factors(key, 5, 256, 150, PAIRS[pair])
    d_out = jax.random.normal(key, (5, 150))
    with interpret_kernels("values"):
        actual = _gradient("pallas_tpu", x, w, d_out, SMALL)
    expected = _gradient("reference", x, w, d_out)
    assert actual.dtype == x.dtype
    assert_close(actual, expected, "matmul", str(x.dtype))


def test_gradient_of_filled_blocks(key):
    x, w = _factors(key, 2, 120, 6, ("float32", ("int8", 40)))
    d_out = jax.random.normal(key, (2, 6))
    with interpret_kernels("values"):
        actual = _gradient("pallas_tpu", x, w, d_out)
    assert_close(actual, _gradient("reference", x, w, d_out), "matmul")


def test_nonfinite_scales_affect_only_their_values(key):
    """NaN, infinite and zero scales affect only their block and column, or row."""
    x, w = _factors(key, 3, 256, 10, (("int8", None), ("int8", 128)))
    scales = w.scales.at[1, 2].set(jnp.nan).at[0, 4].set(jnp.inf).at[:, 6].set(0.0)
    w = QuantizedArray(values=w.values, scales=scales, axis=-2)
    x = QuantizedArray(values=x.values, scales=x.scales.at[1].set(jnp.nan), axis=-1)
    with interpret_kernels("values"):
        out = np.asarray(_product("pallas_tpu", x, w))
    assert np.all(np.isnan(out[1])) and np.all(np.isnan(out[:, 2]))
    assert not np.any(np.isfinite(out[:, 4]))
    np.testing.assert_array_equal(out[[0, 2], 6], 0.0)
    others = np.ix_([0, 2], [0, 1, 3, 5, 7, 8, 9])
    assert_close(out[others], np.asarray(_product("reference", x, w))[others], "matmul")


def test_empty_input(key):
    factors = jax.jit(lambda key: _factors(key, 0, 8, 4, ("float32", ("int8", None))))
    with interpret_kernels("values"):
        assert jax.eval_shape(lambda: _product("pallas_tpu", *factors(key))).shape == (0, 4)


def test_no_quantised_factor(key):
    x, w = _factors(key, 3, 8, 4, ("float32", "float32"))
    with interpret_kernels("values"):
        assert_close(_product("pallas_tpu", x, w), _product("reference", x, w), "matmul")


def test_wrong_platform_is_refused(key):
    with pytest.raises(ValueError, match="needs a tpu and this process has a cpu"):
        jax.eval_shape(lambda: _product("pallas_tpu", *_factors(key, 2, 256, 4, PAIRS["w8a8"])))


FAULTS = {
    "a scale block too far": (
        "column",
        lambda row: pallas_tpu.jnp.roll(jnp.broadcast_to(row, (128, row.shape[1])).T, 1, axis=0),
    ),
    "the last piece left out": ("_blocks", lambda *a: list(FAULTLESS["_blocks"](*a))[:-1]),
    "a sum in 16 bits": (
        "_dot",
        lambda *a: FAULTLESS["_dot"](*a).astype(jnp.int16).astype(jnp.int32),
    ),
}
FAULTLESS = {name: getattr(pallas_tpu, name) for name in ("_blocks", "_dot")}


FIRST_FAULT, *FAULTS_LEFT = FAULTS


@pytest.mark.parametrize(
    "fault", [FIRST_FAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in FAULTS_LEFT)]
)
def test_faulty_kernel_is_caught(key, monkeypatch, fault):
    monkeypatch.setattr(pallas_tpu, *FAULTS[fault])
    factors = _factors(key, 5, 256, 40, (("int8", 128), ("int8", None)))
    jax.clear_caches()  # programs traced before have no fault
    with pytest.raises(AssertionError, match="Mismatched elements"):
        _assert_product(*factors)
    jax.clear_caches()


def _layout(m, k, n, x_dtype, w_dtype, block, is_turned):
    values = jax.ShapeDtypeStruct((k, n), w_dtype)
    scales = jax.ShapeDtypeStruct((k // block if block else 1, n), jnp.float32)
    w = QuantizedArray(values=values, scales=scales, axis=-2)
    found = []

    def run(w):
        x = jax.ShapeDtypeStruct((m, k), x_dtype)
        found.append(pallas_tpu_layout.lay_out(x, w, jnp.dtype("bfloat16"), is_turned=is_turned)[0])

    jax.eval_shape(run, w)
    return found[0]


@settings(max_examples=60)
@given(
    m=st.integers(1, 20000),
    blocks=st.integers(1, 300),
    n=st.integers(1, 20000),
    dtypes=st.sampled_from([("bfloat16", "int4"), ("float32", "int8"), ("bfloat16", "int8")]),
    block=st.sampled_from([None, 16, 32, 48, 64, 128, 200, 256, 1024, 4096]),
    is_turned=st.booleans(),
)
def test_the_rule_always_fits(m, blocks, n, dtypes, block, is_turned):
    """Registers and blocks are whole, with little padding."""
    k = blocks * (block or 100)
    layout = _layout(m, k, n, *dtypes, block, is_turned)
    tiles = {"m": layout.tile_m, "k": layout.tile_k, "n": layout.tile_n}
    widths = tuple(pallas_tpu_layout._width(jnp.dtype(d)) for d in (*dtypes, "bfloat16"))
    assert pallas_tpu_layout._fits(layout, tiles, widths)
    given, filled = layout.filled
    assert (given, filled) == (k, k) or (given == block and filled < block + 128)
    assert k // given * filled <= layout.k < k // given * filled + 128


def test_lowered_for_a_tpu(key):
    """Tile shapes for a TPU are valid; libtpu is not needed."""
    device = AbstractDevice("TPU v5 lite", None, "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    shapes = jax.eval_shape(lambda: _factors(key, 1000, 1152, 700, PAIRS["w4a16"]))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.square(quantized_matmul(x, w))))).trace
        text = traced(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 2


@pytest.mark.slow
@pytest.mark.parametrize("pair", conformance.PAIRS)
def test_conformance(pair):
    with interpret_kernels("values"), _tiles(dict(SMALL), is_turned=None):
        multiply = functools.partial(quantized_matmul, implementation="pallas_tpu")
        conformance.check_product(multiply, conformance.PAIRS[pair])
        if all(factor.is_integer for factor in conformance.PAIRS[pair]):
            conformance.check_exact_product(multiply, conformance.PAIRS[pair])


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["w8a8", "w4a8 blocks", "w4a4", "mxfp8", "w4a16"])
def test_in_the_machine(key, pair):
    """With a TPU's memories: unwritten reads are NaN, out-of-bounds accesses raise."""
    _assert_product(*_factors(key, 130, 256, 150, PAIRS[pair]), "machine")


@pytest.mark.slow
def test_gradient_in_the_machine(key):
    x, w = _factors(key, 5, 256, 150, PAIRS["w4a16"])
    d_out = jax.random.normal(key, (5, 150))
    with interpret_kernels("machine"):
        actual = _gradient("pallas_tpu", x, w, d_out, SMALL)
    assert_close(actual, _gradient("reference", x, w, d_out), "matmul", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["w8a8", "w4a16"])
def test_in_a_manual_region(key, pair):
    """Rows on two devices, with checked types; gradients stay with their rows."""
    x, w = _factors(key, 6, 256, 140, PAIRS[pair])
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), (AxisType.Auto,))
    rows, whole = PartitionSpec("x"), PartitionSpec()
    is_differentiated = not isinstance(x, QuantizedArray)

    def run(implementation, x, w):
        def product(x):
            return quantized_matmul(x, w, implementation=implementation, out_dtype=jnp.float32)

        out, pull = jax.vjp(product, x) if is_differentiated else (product(x), None)
        return (out,) if pull is None else (out, *pull(jnp.cos(out)))

    def split(a):
        return rows if a.shape[0] == 6 else whole

    specs = (jax.tree.map(split, x), jax.tree.map(lambda _: whole, w))
    with interpret_kernels("machine"):
        call = functools.partial(run, "pallas_tpu")
        manual = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=True)
        actual = jax.jit(manual)(x, w)
    assert_close(actual, run("reference", x, w), "matmul", "bfloat16")


DESCRIBED = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
COMPILED = {
    # At shapes of OLMoE and Mixtral: few rows, and many.
    "w4a16 for one": ((1, 2048, 1024), "bfloat16", ("int4", 128)),
    "w8a16 for 32": ((32, 2048, 1024), "bfloat16", ("int8", None)),
    "w4a8 for 32": ((32, 4096, 14336), ("int8", None), ("int4", 128)),
    "w8a8": ((8192, 2048, 2048), ("int8", None), ("int8", None)),
    "w8a8 blocks": ((8192, 2048, 1024), ("int8", 128), ("int8", 128)),
    "fp8": ((8192, 2048, 1024), ("float8_e4m3fn", None), ("float8_e4m3fn", None)),
    "w4a4": ((4096, 2048, 1024), ("int4", None), ("int4", 128)),
    "mixed for 16": ((16, 2048, 1024), "bfloat16", "mixed"),
}
# For one kind of TPU: they take long, or have nothing to do with the kind.
COMPILED_ONCE = {
    "mixed": ((4096, 2048, 1024), "bfloat16", "mixed"),
    "w4a16": ((8192, 4096, 14336), "bfloat16", ("int4", 64)),
    "mxfp8": ((2048, 1024, 1024), ("mxfp8", None), ("mxfp8", None)),
    "odd": ((77, 200, 100), ("int8", None), ("int4", 40)),
}


def _of_zeros(m, k, n, pair):
    x, w = jnp.zeros((m, k)), jnp.zeros((k, n))
    if pair[1] == "mixed":
        return x.astype(pair[0]), quantize_mixed(w, x[:8], num_wide=3)
    return _factor(x, pair[0], -1), _factor(w, pair[1], -2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"),
    [*itertools.product(DESCRIBED, COMPILED), *(("v5e", case) for case in COMPILED_ONCE)],
)
def test_compiled_for_a_tpu(monkeypatch, kind, case):
    """Kernels fit into the memory of a core, and w is never unpacked in HBM."""
    (m, k, n), *pair = (COMPILED | COMPILED_ONCE)[case]
    devices = described_tpus(monkeypatch, DESCRIBED[kind])
    mesh = Mesh(np.array(devices[:1]), ("x",), (AxisType.Auto,))
    here = NamedSharding(mesh, PartitionSpec())
    factors = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here),
        jax.eval_shape(functools.partial(_of_zeros, m, k, n, pair)),
    )
    is_constant = isinstance(factors[0], QuantizedArray) or pair[1] == "mixed"

    def run(x, w):
        if is_constant:
            return quantized_matmul(x, w, out_dtype=jnp.bfloat16)
        out, pull = jax.vjp(lambda x: quantized_matmul(x, w), x)
        return out, pull(out)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(run).lower(*factors).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    assert text.count('custom_call_target="tpu_custom_call"') == (1 if is_constant else 2)
    if k * n > 2**22:
        assert memory.temp_size_in_bytes < k * n / 2
