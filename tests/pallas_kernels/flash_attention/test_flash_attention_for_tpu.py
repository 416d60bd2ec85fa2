# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests flash_attention on TPUs: skipped tiles, the machine interpreter, lowering and compilation.

Values are covered by test_flash_attention.py; here JAX's own TPU kernel is compared too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu import flash_attention as shipped
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.flash_attention.tpu import blocks
from pallas_kernels.interpreter import interpret_kernels
from tests.support.tolerances import assert_close
from tests.support.tpus import described_tpus

NOTHING_GIVEN = Tokens(None, None, None, None)


@st.composite
def attentions(draw):
    """Sizes with several blocks, rules and tokens, as numpy arrays."""
    s, u, g = draw(st.integers(1, 30)), draw(st.integers(1, 30)), draw(st.integers(1, 3))
    sizes = blocks.TileSizes(
        b=2, s=s, u=u, m=1, g=g, h=1, hv=1,
        row_positions=draw(st.integers(1, 12)), key_block=draw(st.integers(1, 12)),
    )  # fmt: skip
    window = draw(st.none() | st.integers(1, 20))
    rules = Rules(causal=draw(st.booleans()), window=window, softcap=None, scale=1.0)

    def ids(length, largest):
        row = st.lists(st.integers(0, largest), min_size=length, max_size=length)
        return np.array(draw(st.tuples(row, row)), np.int32)

    tokens = NOTHING_GIVEN
    if draw(st.booleans()):
        tokens = tokens._replace(q_positions=ids(s, 40), kv_positions=ids(u, 40))
    if draw(st.booleans()):
        segments = np.sort(ids(s, 2)), np.sort(ids(u, 2))
        tokens = tokens._replace(q_segment_ids=segments[0], kv_segment_ids=segments[1])
    return sizes, rules, tokens


@settings(max_examples=150)
@given(attentions())
def test_no_visible_key_is_left_out(attention):
    """No visible key is skipped, and no mask is skipped where it hides a key."""
    sizes, rules, tokens = attention
    plan = blocks.make_plan(sizes, tokens, rules)
    q, k = (
        np.broadcast_to(np.arange(length) if given is None else given, (2, length))
        for given, length in zip(tokens[:2], (sizes.s, sizes.u), strict=True)
    )
    distance = q[:, :, None] - k[:, None, :]
    is_visible = (distance >= 0) | (not rules.causal)
    is_visible &= (rules.window is None) or (np.abs(distance) < rules.window)
    if tokens.q_segment_ids is not None:
        is_visible &= tokens.q_segment_ids[:, :, None] == tokens.kv_segment_ids[:, None, :]
    shape = (sizes.row_blocks, sizes.row_positions, sizes.key_blocks, sizes.key_block)
    pad = ((0, 0), (0, shape[0] * shape[1] - sizes.s), (0, sizes.keys - sizes.u))
    some, every = (
        np.pad(is_visible, pad, constant_values=fill).reshape(2, *shape) for fill in (False, True)
    )
    some, every = np.any(some, (2, 4)), np.all(every, (2, 4))

    def read(bounds, number):
        one = np.asarray(bounds).reshape(-1, number, blocks.RECORD)
        return np.broadcast_to(one, (2, number, blocks.RECORD))

    rows, keys = read(plan.row_bounds, sizes.row_blocks), read(plan.key_bounds, sizes.key_blocks)
    by_row = blocks.Bounds(*(rows[:, :, None, i] for i in range(4)))
    by_key = blocks.Bounds(*(keys[:, None, :, i] for i in range(4)))
    assert not np.any(some & ~blocks.may_see(rules, by_row, by_key))
    assert not np.any(blocks.all_see(rules, by_row, by_key) & ~every)
    for side, steps, hits in ((rows, plan.key_steps, some), (keys, plan.row_steps, some.mT)):
        first, last = side[..., 4, None], side[..., 5, None]
        index = np.arange(np.shape(hits)[-1])
        assert not np.any(hits & ((index < first) | (index > last)))
        assert np.all(last - first < steps)


@pytest.mark.parametrize(
    ("window", "share"),
    # Whole tiles of 512 x 1024 below the diagonal of 8192 x 8192; of windows, of 512 x 256, three
    # of 32 blocks of keys for a block of rows.
    [(None, 0.5 + 1 / 16), (128, 3 / 32), (256, 3 / 32)],
)
def test_share_of_the_tiles_that_is_computed(window, share):
    rules = Rules(causal=True, window=window, softcap=None, scale=1.0)
    length = blocks.block_sizes(8192, 8192, 1, 128, 2, window)
    sizes = blocks.TileSizes(1, 8192, 8192, 1, 1, 128, 128, *length)
    plan = blocks.make_plan(sizes, NOTHING_GIVEN, rules)
    records = np.asarray(plan.row_bounds).reshape(-1, blocks.RECORD)
    visited = np.sum(records[:, 5] - records[:, 4] + 1)
    assert visited <= share * sizes.row_blocks * sizes.key_blocks
    # Skipped steps: as many again where the range grows with the row, none in a window.
    assert plan.key_steps <= (8 if window is None else 3)


@given(
    s=st.integers(1, 5000),
    u=st.integers(1, 5000),
    g=st.integers(1, 130),
    width=st.integers(1, 2000),
    itemsize=st.sampled_from([2, 4]),
    window=st.none() | st.integers(1, 5000),
)
def test_blocks_are_whole_registers_and_padding_is_small(s, u, g, width, itemsize, window):
    sizes = blocks.block_sizes(s, u, g, width, itemsize, window)
    for length, block in zip((s, u), sizes, strict=True):
        assert block % blocks.SUBLANES == 0
        number = -(-length // block)
        assert number * block - length < number * blocks.LANES
    assert sizes.keys % blocks.LANES == 0 or sizes.keys >= u
    rows = g * sizes.positions
    assert rows <= max(512, g * blocks.SUBLANES)
    assert rows * sizes.keys <= max(512 * 1024, rows * blocks.LANES)


def _inputs(key, b, s, n, m, h, hv, dtype="float32"):
    keys = jax.random.split(key, 4)
    shapes = ((b, s, n, h), (b, s, m, h), (b, s, m, hv), (b, s, n, hv))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in pairs]


@functools.partial(
    jax.jit, static_argnums=(0,), compiler_options={"xla_backend_optimization_level": 0}
)
def _value_and_gradients(attend, q, k, v, d_out):
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(d_out)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {"softcap": 3.0}),
        pytest.param("bfloat16", {"window": 9, "causal": False}, marks=pytest.mark.slow),
        pytest.param("float32", {"window": 4}, marks=pytest.mark.slow),
    ],
)
def test_in_the_machine(key, monkeypatch, dtype, options):
    """With a TPU's memories: unwritten reads are NaN, out-of-bounds accesses raise."""
    monkeypatch.setattr(blocks, "block_sizes", lambda *_: blocks.BlockSizes(8, 16))
    inputs = _inputs(key, 1, 20, 2, 1, 8, 12, dtype)
    segments = jnp.repeat(jnp.arange(3, dtype=jnp.int32), jnp.array([5, 12, 3]))[None]
    given = {"q_segment_ids": segments, "kv_segment_ids": segments} | options

    def attend(implementation, q, k, v):
        return flash_attention(q, k, v, **given, implementation=implementation)[0]

    expected = _value_and_gradients(functools.partial(attend, "reference"), *inputs)
    with interpret_kernels("machine"):
        actual = _value_and_gradients(functools.partial(attend, "pallas_tpu"), *inputs)
    assert_close(actual, expected, "attention", dtype)


def test_against_the_kernel_of_jax(key):
    """Compare with jax.experimental.pallas.ops.tpu.flash_attention."""
    q, k, v, d_out = _inputs(key, 1, 256, 1, 1, 128, 128)
    segments = (jnp.arange(256, dtype=jnp.int32) >= 100).astype(jnp.int32)[None]
    sizes = shipped.BlockSizes(
        **dict.fromkeys(
            (
                "block_q",
                "block_k_major",
                "block_k",
                "block_q_major_dkv",
                "block_k_major_dkv",
                "block_k_dkv",
                "block_q_dkv",
                "block_k_major_dq",
                "block_k_dq",
                "block_q_dq",
            ),
            128,
        ),
        block_b=1,
    )

    def theirs(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        ids = shipped.SegmentIds(segments, segments)
        with jax.numpy_dtype_promotion("standard"):
            out = shipped.flash_attention(
                q, k, v, segment_ids=ids, causal=True, sm_scale=0.1, block_sizes=sizes
            )
        return out.swapaxes(1, 2)

    def ours(q, k, v):
        given = {"q_segment_ids": segments, "kv_segment_ids": segments, "scale": 0.1}
        return flash_attention(q, k, v, **given, implementation="pallas_tpu")[0]

    with interpret_kernels("values"):
        actual, expected = (_value_and_gradients(f, q, k, v, d_out) for f in (ours, theirs))
    assert_close(actual, expected, "attention")


def _loss(options, tokens, q, k, v):
    out, lse = flash_attention(q, k, v, **options, **tokens)
    return jnp.sum(jnp.square(out.astype(jnp.float32))) + jnp.sum(lse)


def test_lowered_for_a_tpu():
    """Block shapes for a TPU are valid; libtpu is not needed."""
    device = AbstractDevice("TPU v5 lite", None, "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    q, kv = (jax.ShapeDtypeStruct((2, 1000, n, 64), jnp.bfloat16) for n in (4, 2))
    ids = jax.ShapeDtypeStruct((2, 1000), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(jax.grad(functools.partial(_loss, {"window": 100}), argnums=(1, 2, 3)))
        tokens = {"q_segment_ids": ids, "kv_segment_ids": ids}
        text = step.trace(tokens, q, kv, kv).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 3


@pytest.fixture
def one_tpu(monkeypatch):
    """Return a mesh of one described device."""
    devices = described_tpus(monkeypatch, "v5e:2x2")
    return Mesh(np.array(devices[:1]), ("x",), (AxisType.Auto,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "options", "given"),
    # S, N, M, H, Hv; then the widest heads of every row of the table of block sizes.
    [
        ((8192, 16, 4, 128, 128), "bfloat16", {}, ()),
        ((8192, 16, 4, 128, 128), "bfloat16", {}, ("segment_ids",)),
        ((8192, 16, 4, 128, 128), "bfloat16", {"window": 1024, "softcap": 30.0}, ("positions",)),
        ((8192, 16, 16, 192, 128), "bfloat16", {}, ()),
        ((1000, 8, 2, 80, 64), "float32", {"causal": False}, ("segment_ids",)),
        ((2048, 2, 2, 256, 256), "bfloat16", {"softcap": 30.0}, ("segment_ids",)),
        ((2048, 16, 1, 576, 512), "bfloat16", {"softcap": 30.0}, ("segment_ids",)),
        ((2048, 2, 2, 1024, 1024), "bfloat16", {"softcap": 30.0}, ("segment_ids",)),
        ((2048, 2, 2, 256, 256), "float32", {"softcap": 30.0}, ("segment_ids",)),
        ((2048, 2, 2, 640, 640), "float32", {"softcap": 30.0}, ("segment_ids",)),
        ((2048, 2, 2, 1024, 1024), "float32", {"softcap": 30.0}, ("segment_ids",)),
    ],
)
def test_compiled_for_a_tpu(one_tpu, shape, dtype, options, given):
    """Both passes fit into the memory of a core, without a matrix of scores."""
    s, n, m, h, hv = shape
    here = NamedSharding(one_tpu, PartitionSpec())
    heads = ((n, h), (m, h), (m, hv))
    arrays = [jax.ShapeDtypeStruct((1, s, *x), dtype, sharding=here) for x in heads]
    ids = jax.ShapeDtypeStruct((1, s), jnp.int32, sharding=here)
    tokens = {f"{side}_{name}": ids for side in ("q", "kv") for name in given}
    with jax.sharding.use_abstract_mesh(one_tpu.abstract_mesh):
        step = jax.jit(jax.value_and_grad(functools.partial(_loss, options), argnums=(1, 2, 3)))
        compiled = step.lower(tokens, *arrays).compile()
    names = {"flash_attention", "flash_attention_d_queries", "flash_attention_d_keys"}
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    assert all(f"({name})" in text for name in names)
    if s == 8192:
        assert memory.temp_size_in_bytes < n * s * s
