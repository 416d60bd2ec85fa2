# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests grouped_swiglu on tokens, whose rows are read by index.

The definition is compared with products with each token's own matrices; the kernels of TPUs with
the same operation on gathered rows, bit for bit, in the interpreter; and their compiled programs
keep no sorted rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped_swiglu, quantize
from pallas_kernels.grouped_matmul.tpu import blocks, gather, multiply
from pallas_kernels.grouped_matmul.tpu.blocks import Tile
from pallas_kernels.grouped_swiglu import RowIndices
from pallas_kernels.interpreter import Interpreter, interpret_kernels
from tests.support.tpus import described_tpus

T, K, E, F = 40, 2, 4, 24


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles of 16 rows in pieces of 8, and blocks of 256 columns."""
    for kernel in blocks.TABLE[""]:
        monkeypatch.setitem(blocks.TABLE[""], kernel, Tile(16, 256, 256))
    monkeypatch.setattr(blocks, "LANES", 8)
    monkeypatch.setattr(blocks, "PIECE", 8)
    monkeypatch.setattr(multiply, "PIECE", 8)


def _routed(seed=9):
    """Two experts for each token or fewer: E + 1 stands for none; expert 2 has no row."""
    ids = np.random.default_rng(seed).integers(0, E + 1, (T, K))
    ids = np.where(ids == 2, E, ids)
    order = np.argsort(ids.reshape(-1), kind="stable")
    places = np.argsort(order).reshape(T, K)
    sizes = np.bincount(ids.reshape(-1), minlength=E + 1)[:E]
    indices = RowIndices(jnp.asarray(order // K, jnp.int32), jnp.asarray(places, jnp.int32))
    return ids, jnp.asarray(sizes, jnp.int32), indices


def _inputs(width, dtype):
    keys = jax.random.split(jax.random.key(3), 5)
    tokens = jax.random.normal(keys[0], (T, width))
    gate_up = 0.1 * jax.random.normal(keys[1], (E, width, 2, F))
    down = 0.2 * jax.random.normal(keys[2], (E, F, width))
    d_out = jax.random.normal(keys[3], (T, width))
    factors = jax.random.uniform(keys[4], (T * K,))
    return (*(x.astype(dtype) for x in (tokens, gate_up, down)), factors, d_out.astype(dtype))


def _gradients(function, *inputs):
    *arrays, d_out = inputs
    out, pull = jax.vjp(function, *arrays)
    return out, *pull(d_out)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_oracle_against_matrices_gathered_for_each_token(implementation):
    ids, sizes, indices = _routed()
    inputs = _inputs(16, "float32")

    def by_index(tokens, gate_up, down, factors):
        arrays = (tokens, gate_up, down, sizes, factors)
        return grouped_swiglu(*arrays, indices=indices, implementation=implementation)

    def with_matrices_of_tokens(tokens, gate_up, down, factors):
        is_assigned = jnp.asarray(ids < E)
        experts = jnp.minimum(jnp.asarray(ids), E - 1)
        z = jnp.einsum("tk,tekif->teif", tokens, gate_up[experts])
        gates = jnp.where(is_assigned, factors[indices.places], 0.0)
        hidden = gates[..., None] * jax.nn.silu(z[:, :, 0]) * z[:, :, 1]
        return jnp.einsum("tef,tefk->tk", hidden, down[experts])

    results = [
        jax.jit(functools.partial(_gradients, function))(*inputs)
        for function in (by_index, with_matrices_of_tokens)
    ]
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def _by_index_and_gathered(inputs, sizes, indices, *, halves=False, is_turned=False):
    """Return value and gradients of both, one compiled program each."""

    def apply(is_gathered, tokens, gate_up, down, factors):
        rows = indices.rows_of(tokens) if is_gathered else tokens
        matrices = (gate_up[:, :, 0], gate_up[:, :, 1]) if halves else gate_up
        out = grouped_swiglu(
            rows,
            matrices,
            down,
            sizes,
            factors,
            indices=None if is_gathered else indices,
            down_is_turned=is_turned,
            implementation="pallas_tpu",
        )
        return indices.sums_of(out) if is_gathered else out

    return [
        jax.jit(functools.partial(_gradients, functools.partial(apply, is_gathered)))(*inputs)
        for is_gathered in (False, True)
    ]


CASES: dict[str, tuple[str, Interpreter, bool]] = {
    "bfloat16": ("bfloat16", "values", False),
    "float32": ("float32", "values", False),
    "bfloat16_turned": ("bfloat16", "values", True),
    "bfloat16_machine": ("bfloat16", "machine", False),
    "float32_machine": ("float32", "machine", True),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "case", [x if x == "bfloat16" else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_rows_by_index_are_those_that_were_gathered(case):
    """Bitwise, in value and gradients; sums in two parts, tiles with several experts."""
    dtype, interpreter, is_turned = CASES[case]
    _, sizes, indices = _routed()
    inputs = _inputs(512, dtype)
    with interpret_kernels(interpreter):
        by_index, gathered = _by_index_and_gathered(
            inputs, sizes, indices, halves=is_turned, is_turned=is_turned
        )
    assert np.any(by_index[0])
    for name, x, y in zip(("out", "x", "gate_up", "down", "s"), by_index, gathered, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


@pytest.mark.usefixtures("small_tiles")
def test_a_copy_of_the_wrong_row_is_found(monkeypatch):
    """The comparison can fail."""
    _, sizes, indices = _routed()
    tokens, gate_up, down, factors, _ = _inputs(256, "bfloat16")
    by_tile = gather.indices_by_tile
    monkeypatch.setattr(multiply, "indices_by_tile", lambda *a: by_tile(*a).at[0, 0, 3].add(1))
    apply = functools.partial(
        grouped_swiglu, tokens, gate_up, down, sizes, factors, indices=indices
    )
    with interpret_kernels("values"):
        by_index = apply(implementation="pallas_tpu")
    gathered = apply(implementation="reference")
    is_close = np.isclose(*(np.asarray(x, np.float32) for x in (by_index, gathered)), atol=0.1)
    assert 1 <= np.sum(~is_close.all(1)) <= 2  # one token lost its row, another may have got it


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_words_hold_every_value(dtype):
    """NaN, infinities and subnormal values included."""
    bits = np.arange(4 * 768, dtype=np.uint32).reshape(4, 768) * np.uint32(0x9E3779B1)
    integer = np.uint32 if dtype == "float32" else np.uint16
    rows = jax.lax.bitcast_convert_type(jnp.asarray((bits >> 7).astype(integer)), dtype)
    words = gather.words_of(rows, 256)
    assert words.dtype.itemsize == 4 and words.nbytes == rows.nbytes
    width = words.shape[1] // 3
    blocks_of_values = [
        gather.values_of(words[:, i * width : (i + 1) * width], rows.dtype) for i in range(3)
    ]
    values = jnp.concatenate(blocks_of_values, axis=1)
    is_nan = np.isnan(np.asarray(rows, np.float32))
    np.testing.assert_array_equal(is_nan, np.isnan(np.asarray(values, np.float32)))
    as_integers = (np.asarray(jax.lax.bitcast_convert_type(x, integer)) for x in (rows, values))
    x, y = as_integers
    np.testing.assert_array_equal(x[~is_nan], y[~is_nan])


def test_blocks_of_columns_divide_the_width():
    for width, limit, block in [
        (512, 2048, 512),
        (7168, 2048, 1792),
        (2816, 1024, 256),
        (4096, 128, 256),
    ]:
        assert gather.even_block(width, limit) == block
        assert width % block == 0


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", ["narrow", pytest.param("few_bits", marks=pytest.mark.slow)])
def test_narrow_tokens_and_matrices_of_few_bits(case):
    """The former are gathered, the latter read by index."""
    _, sizes, indices = _routed()
    tokens, gate_up, down, factors, _ = _inputs(48 if case == "narrow" else 256, "float32")
    if case == "few_bits":
        gate_up, down = quantize(gate_up, "int8", axis=-3), quantize(down, "int8", axis=-2)

    def apply(implementation):
        arrays = (tokens, gate_up, down, sizes, factors)
        return grouped_swiglu(*arrays, indices=indices, implementation=implementation)

    with interpret_kernels("values"):
        actual = apply("pallas_tpu")
    np.testing.assert_allclose(actual, apply("reference"), rtol=1e-4, atol=1e-4)


def test_lowered_for_a_tpu():
    """All kernels of both passes, from shapes alone."""
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    _, sizes, indices = _routed()

    def like(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def loss(tokens, gate_up, down):
        out = grouped_swiglu(tokens, gate_up, down, sizes, indices=indices)
        return jnp.sum(out.astype(jnp.float32))

    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        traced = step.trace(like(T, 512), like(E, 512, 2, 128), like(E, 128, 512))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    # As of gathered rows: z, d_hidden, d_rows, d_in, d_out, and the result in older JAX.
    assert text.count("stablehlo.custom_call @tpu_custom_call") in (5, 6)
    gathers = [line for line in text.splitlines() if "stablehlo.gather" in line]
    assert gathers and not any(f"-> tensor<{T * K}x512xbf16>" in line for line in gathers)


MODELS = {"olmoe": (16384, 8, 64, 2048, 1024), "deepseek_v3": (4096, 8, 256, 7168, 2048)}
"""Tokens, experts of each, experts, width, hidden width."""


def compiled_layer(mesh, model, *, is_indexed):
    """Return the program of value and gradients of a layer's experts on one TPU."""
    tokens, top_k, groups, width, hidden = MODELS[model]
    here = NamedSharding(mesh, P())

    def like(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def layer(x, gate, up, down, sizes, factors, sources, places, d_out):
        indices = RowIndices(sources, places)

        def apply(x, gate, up, down, factors):
            rows = x if is_indexed else indices.rows_of(x)
            out = grouped_swiglu(
                rows,
                (gate, up),
                down,
                sizes,
                factors,
                indices=indices if is_indexed else None,
                down_is_turned=True,
            )
            return out if is_indexed else indices.sums_of(out)

        # The backward pass finds the hidden units, and takes rows again.
        policy = jax.checkpoint_policies.save_only_these_names("grouped_swiglu_hidden")
        kept = jax.checkpoint(apply, policy=policy, prevent_cse=False)
        return _gradients(kept, x, gate, up, down, factors, d_out)

    arrays = (
        like(tokens, width),
        *(like(groups, width, hidden),) * 2,
        like(groups, hidden, width),
        like(groups, dtype=jnp.int32),
        like(tokens * top_k, dtype=jnp.float32),
        like(tokens * top_k, dtype=jnp.int32),
        like(tokens, top_k, dtype=jnp.int32),
        like(tokens, width),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(layer).lower(*arrays).compile()


@pytest.fixture(params=["v5e:2x2", "v5p:2x2x1"])
def one_tpu(monkeypatch, request):
    """Return a mesh of one described device."""
    devices = described_tpus(monkeypatch, request.param)
    return Mesh(np.array(devices[:1]), ("x",), (AxisType.Auto,))


@pytest.mark.slow
def test_a_layer_compiled_for_a_tpu_writes_no_sorted_inputs(one_tpu):
    """Less is moved and less is alive than with gathered rows."""
    programs = [compiled_layer(one_tpu, "olmoe", is_indexed=x) for x in (True, False)]
    tokens, top_k, _, width, _ = MODELS["olmoe"]
    alive, moved = [], []
    for program in programs:
        memory, costs = program.memory_analysis(), program.cost_analysis()
        assert memory is not None and costs is not None
        alive.append(memory.temp_size_in_bytes)
        moved.append(costs["bytes accessed"])
    rows = 2 * tokens * top_k * width
    assert alive[1] - alive[0] >= 0.9 * rows, alive
    assert moved[1] - moved[0] >= 2 * rows, moved
