# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares every implementation of flash_attention with the reference, and both with jax.nn.

To add an implementation: a name in IMPLEMENTATIONS. To add a case: a row in CASES.
"""

import contextlib
import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import OPERATIONS, flash_attention
from pallas_kernels.flash_attention import OPERATION, xla
from pallas_kernels.flash_attention.api import KERNELS
from pallas_kernels.flash_attention.kernels import AttentionOperands, OutGradient, softmax_delta
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.flash_attention.tpu import blocks as pallas_tpu_blocks
from pallas_kernels.flash_attention.tpu.blocks import BlockSizes
from pallas_kernels.interpreter import interpret_kernels

IMPLEMENTATIONS = ("xla", "pallas_tpu")

# How kernels run that do not run on the CPU by themselves. The plain interpreter takes half the
# time of the machine's, for which there is test_flash_attention_for_tpu.py.
INTERPRETED = {"pallas_tpu": functools.partial(interpret_kernels, "values")}


def on_the_cpu(implementation):
    return INTERPRETED.get(implementation, contextlib.nullcontext)()


# Softmax over at most 64 keys of unit normals; bfloat16 keeps 8 bits, of the weights too.
TOLERANCES = {
    "float32": {"rtol": 1e-4, "atol": 2e-5},
    "bfloat16": {"rtol": 3e-2, "atol": 5e-2},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, options and integer arrays (as nested tuples, so that a case is hashable)."""

    b: int = 2
    s: int = 40
    u: int = 40
    n: int = 4
    m: int = 2
    h: int = 8
    hv: int = 8
    options: tuple = ()
    tokens: tuple = ()
    dtype: str = "float32"


RAMP = tuple(range(40))
PACKED = ((0,) * 7 + (1,) * 20 + (2,) * 13, (4,) * 39 + (9,))
RESTARTING = (
    tuple(range(7)) + tuple(range(20)) + tuple(range(13)),
    tuple(range(39)) + (0,),
)

CASES = {
    "causal": Case(),
    "full": Case(options=(("causal", False),)),
    "multi_head": Case(m=4),
    "multi_query": Case(m=1),
    "wide_values": Case(hv=12),
    "one_block": Case(s=16, u=16),
    "one_query_more_than_a_block": Case(s=17, u=17),
    "many_blocks": Case(b=1, s=64, u=64, n=2),
    "more_keys": Case(u=53),
    "fewer_keys": Case(u=21),
    "fewer_keys_full": Case(u=21, options=(("causal", False),)),
    "scale": Case(options=(("scale", 0.1),)),
    "softcap": Case(options=(("softcap", 2.0),)),
    "window": Case(options=(("window", 5),)),
    "window_of_one": Case(options=(("window", 1),)),
    "window_full": Case(options=(("window", 5), ("causal", False))),
    "window_beyond_the_keys": Case(u=10, options=(("window", 3),)),
    "segments": Case(tokens=(("q_segment_ids", PACKED), ("kv_segment_ids", PACKED))),
    "segments_full": Case(
        tokens=(("q_segment_ids", PACKED), ("kv_segment_ids", PACKED)),
        options=(("causal", False),),
    ),
    "packed": Case(
        tokens=(
            ("q_segment_ids", PACKED),
            ("kv_segment_ids", PACKED),
            ("q_positions", RESTARTING),
            ("kv_positions", RESTARTING),
        ),
        options=(("window", 6),),
    ),
    "packed_full": Case(
        tokens=(
            ("q_segment_ids", PACKED),
            ("kv_segment_ids", PACKED),
            ("q_positions", RESTARTING),
            ("kv_positions", RESTARTING),
        ),
        options=(("window", 6), ("causal", False)),
    ),
    "shared_positions": Case(tokens=(("q_positions", RAMP[::-1]), ("kv_positions", RAMP))),
    "decoding": Case(s=1, tokens=(("q_positions", ((11,), (39,))),)),
    "decoding_a_chunk": Case(s=3, tokens=(("q_positions", (20, 21, 22)),)),
    "some_see_nothing": Case(tokens=(("kv_positions", tuple(range(30, 70))),)),
    "all_see_nothing": Case(
        tokens=(("q_segment_ids", ((1,) * 40,) * 2), ("kv_segment_ids", ((2,) * 40,) * 2))
    ),
    "bfloat16": Case(dtype="bfloat16"),
}


# Two seconds of compiling for each: what is not here is slow.
QUICK = {
    "pallas_tpu": (
        "full",
        "multi_query",
        "wide_values",
        "softcap",
        "window",
        "packed_full",
        "decoding",
        "some_see_nothing",
        "bfloat16",
    )
}


def case_of(implementation, name, *more):
    is_quick = name in QUICK.get(implementation, CASES)
    return pytest.param(implementation, name, *more, marks=() if is_quick else pytest.mark.slow)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Shrink blocks so that these shapes have several blocks, tiers and steps over heads."""
    monkeypatch.setattr(xla, "BLOCK", 16)
    monkeypatch.setattr(xla, "TIERS", 2)
    monkeypatch.setattr(xla, "MAX_SCORES", 3000)
    monkeypatch.setattr(pallas_tpu_blocks, "block_sizes", lambda *_: BlockSizes(16, 16))


def _inputs(case):
    keys = jax.random.split(jax.random.key(7), 5)
    shapes = (
        (case.b, case.s, case.n, case.h),
        (case.b, case.u, case.m, case.h),
        (case.b, case.u, case.m, case.hv),
        (case.b, case.s, case.n, case.hv),
    )
    q, k, v, d_out = (
        jax.random.normal(key, shape).astype(case.dtype)
        for key, shape in zip(keys, shapes, strict=False)
    )
    d_lse = jax.random.normal(keys[4], (case.b, case.n, case.s))
    return q, k, v, d_out, d_lse


def _value_and_gradients(case, implementation, *inputs):
    with on_the_cpu(implementation):
        return _compiled_value_and_gradients(case, implementation, *inputs)


# Most of the time goes into compiling 50 small programs; the other tests optimise as users do.
@functools.partial(
    jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0}
)
def _compiled_value_and_gradients(case, implementation, q, k, v, d_out, d_lse):
    tokens = {name: jnp.array(ids, jnp.int32) for name, ids in case.tokens}

    def attend(q, k, v):
        return flash_attention(
            q, k, v, **dict(case.options), **tokens, implementation=implementation
        )

    (out, lse), pull = jax.vjp(attend, q, k, v)
    return out, lse, *pull((d_out, d_lse))


def _assert_close(actual, expected, dtype="float32"):
    names = ("out", "lse", "d_q", "d_k", "d_v")
    for name, x, y in zip(names, actual, expected, strict=True):
        assert x.dtype == y.dtype, name
        x, y = (np.asarray(z.astype(jnp.float32)) for z in (x, y))
        np.testing.assert_allclose(x, y, err_msg=name, **TOLERANCES[dtype])


def test_every_implementation_is_in_the_table():
    # test_flash_attention_for_gpu.py has the kernels for GPUs, test_cudnn.py those of cuDNN.
    names = {"reference", "pallas_gpu", "cudnn", *IMPLEMENTATIONS}
    assert set(OPERATIONS["flash_attention"].implementations) == names


@pytest.mark.rows(10)
@pytest.mark.parametrize(
    ("implementation", "name"),
    [case_of(implementation, name) for implementation in IMPLEMENTATIONS for name in CASES],
)
def test_parity(implementation, name):
    case, inputs = CASES[name], _inputs(CASES[name])
    actual = _value_and_gradients(case, implementation, *inputs)
    expected = _value_and_gradients(case, "reference", *inputs)
    _assert_close(actual, expected, case.dtype)
    assert actual[1].dtype == jnp.float32
    for x in (actual[0], *actual[2:]):
        assert np.all(np.isfinite(x.astype(jnp.float32)))


@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS))
def test_queries_without_keys_have_finite_gradients(implementation):
    """An infinite gradient of lse = -inf does not make other gradients infinite."""
    case = CASES["some_see_nothing"]
    q, k, v, d_out, d_lse = _inputs(case)
    d_lse = d_lse.at[:, :, :30].set(jnp.inf)
    out, lse, d_q, d_k, d_v = _value_and_gradients(case, implementation, q, k, v, d_out, d_lse)
    assert all(np.all(np.isfinite(x)) for x in (d_q, d_k, d_v))
    assert not np.any(out[:, :30])
    assert np.all(lse[:, :, :30] == -np.inf)
    assert not np.any(d_q[:, :30])
    assert np.all(np.isfinite(lse[:, :, 30:]))


AGAINST_JAX = {
    "causal": {"is_causal": True},
    "full": {},
    "multi_query": {"is_causal": True},
    "scale": {"is_causal": True, "scale": 0.1},
    "window": {"is_causal": True, "local_window_size": (4, 0)},
    "window_full": {"local_window_size": (4, 4)},
    "fewer_keys_full": {},
}


@pytest.mark.rows(8)
@pytest.mark.parametrize(
    ("implementation", "name", "options"),
    [
        case_of(implementation, name, options)
        for implementation in ("reference", *IMPLEMENTATIONS)
        for name, options in AGAINST_JAX.items()
    ],
)
def test_against_jax(implementation, name, options):
    """Compare with jax.nn.dot_product_attention."""
    q, k, v, d_out, d_lse = _inputs(CASES[name])
    expected = _theirs(tuple(options.items()), q, k, v, d_out)
    out, _, *gradients = _value_and_gradients(
        CASES[name], implementation, q, k, v, d_out, jnp.zeros_like(d_lse)
    )
    for x, y in zip((out, *gradients), expected, strict=True):
        np.testing.assert_allclose(x, y, **TOLERANCES["float32"])


@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
def _theirs(options, q, k, v, d_out):
    out, pull = jax.vjp(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **dict(options)), q, k, v
    )
    return out, *pull(d_out)


def test_lse_is_the_logsumexp():
    case = CASES["full"]
    q, k, *_ = inputs = _inputs(case)
    logits = jnp.einsum("bsnh,bunh->bnsu", q, jnp.repeat(k, 2, axis=2)) / np.sqrt(case.h)
    for implementation in ("reference", *IMPLEMENTATIONS):
        _, lse, *_ = _value_and_gradients(case, implementation, *inputs)
        np.testing.assert_allclose(
            lse, jax.scipy.special.logsumexp(logits, axis=-1), **TOLERANCES["float32"]
        )


@settings(max_examples=300)
@given(
    s=st.integers(1, 90),
    u=st.integers(1, 90),
    block=st.integers(1, 20),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 50),
)
def test_tiers_hold_every_visible_key(s, u, block, causal, window):
    distance = np.arange(s)[:, None] - np.arange(u)[None, :]
    is_visible = (distance >= 0) | (not causal)
    is_visible &= (window is None) or (np.abs(distance) < window)
    blocks = -(-s // block)
    sizes = xla._XlaSizes(1, s, 1, 1, blocks, -(-s // blocks))
    is_covered = np.zeros((s, u), bool)
    rules = Rules(causal=causal, window=window, softcap=None, scale=1.0)
    tiers = xla._tiers(sizes, u, Tokens(None, None, None, None), rules)
    for tier in tiers:
        assert tier.keys.stop > tier.keys.start
        first, last = tier.blocks.start * sizes.block, tier.blocks.stop * sizes.block
        is_covered[first:last, tier.keys] = True
    assert [t.blocks.stop for t in tiers] == [t.blocks.start for t in tiers[1:]] + [blocks]
    assert len(tiers) <= xla.TIERS
    assert not np.any(is_visible & ~is_covered)


def test_memory_is_linear_in_length(monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", 128)

    def temporary_bytes(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        grad = jax.grad(lambda q, k, v: flash_attention(q, k, v)[0].sum(), argnums=(0, 1, 2))
        return jax.jit(grad).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(2048) < 2.2 * temporary_bytes(1024)


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("implementation", "check_vma", "axis_type"),
    [
        pytest.param(
            implementation,
            check_vma,
            axis_type,
            # The interpreter of the machine takes six seconds.
            marks=pytest.mark.slow
            if implementation in INTERPRETED and check_vma == (axis_type == AxisType.Auto)
            else (),
        )
        for implementation in ("reference", *IMPLEMENTATIONS)
        for check_vma in (True, False)
        for axis_type in (AxisType.Auto, AxisType.Explicit)
    ],
)
def test_in_shard_map(implementation, check_vma, axis_type):
    """With queries and positions sharded and keys replicated, gradients of keys are summed."""
    case = dataclasses.replace(
        CASES["causal"], tokens=(("q_positions", RAMP), ("kv_positions", RAMP))
    )
    inputs = _inputs(case)
    expected = _value_and_gradients(case, "reference", *inputs)
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=(axis_type,))
    by_position = P(None, "sequence")
    attend = jax.shard_map(
        lambda q, k, v, q_positions: flash_attention(
            q, k, v, q_positions=q_positions, implementation=implementation
        ),
        mesh=mesh,
        in_specs=(by_position, P(), P(), P("sequence")),
        out_specs=(by_position, P(None, None, "sequence")),
        check_vma=check_vma,
    )
    specs = (by_position, P(), P(), by_position, P(None, None, "sequence"))
    with jax.set_mesh(mesh):
        arrays = [
            jax.device_put(x, jax.NamedSharding(mesh, spec))
            for x, spec in zip(inputs, specs, strict=True)
        ]
        positions = jax.device_put(jnp.arange(40), jax.NamedSharding(mesh, P("sequence")))

        @jax.jit
        def run(q, k, v, d_out, d_lse):
            (out, lse), pull = jax.vjp(lambda q, k, v: attend(q, k, v, positions), q, k, v)
            return out, lse, *pull((d_out, d_lse))

        with interpret_kernels() if implementation == "pallas_tpu" else contextlib.nullcontext():
            actual = run(*arrays)
    _assert_close(actual, expected)


def test_under_checkpoint():
    case = CASES["causal"]
    q, k, v, *_ = _inputs(case)

    def loss(q, implementation):
        attend = jax.checkpoint(lambda q: flash_attention(q, k, v, implementation=implementation))
        return jnp.sum(jnp.square(attend(q)[0]))

    actual, expected = (
        jax.jit(jax.grad(loss), static_argnums=1)(q, name) for name in ("xla", "reference")
    )
    np.testing.assert_allclose(actual, expected, **TOLERANCES["float32"])


GOOD = {"q": (2, 5, 4, 8), "k": (2, 6, 2, 8), "v": (2, 6, 2, 8)}


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"q": (5, 4, 8)}, {}, r"takes q \[B S N H\].* not q \(5, 4, 8\)"),
        ({"q": (3, 5, 4, 8)}, {}, r"must have the same batch, not q \(3, 5, 4, 8\)"),
        ({"q": (2, 5, 4, 9)}, {}, r"q \(9 wide\) and of k \(8\) must have the same width"),
        ({"v": (2, 7, 2, 8)}, {}, r"k and v must have the same length and heads"),
        ({"q": (2, 5, 3, 8)}, {}, r"the 3 heads of q must be a multiple of the 2 heads of k"),
        ({}, {"window": 0}, r"window=0 must be at least 1"),
        ({}, {"softcap": 0.0}, r"softcap=0.0 must be above 0"),
        ({}, {"q_segment_ids": (2, 5)}, r"come together, and only one of them was given"),
        ({}, {"q_positions": (6,)}, r"q_positions \(6,\) must be \(5,\).* or \(2, 5\)"),
        ({}, {"kv_segment_ids": (2, 5)}, r"kv_segment_ids \(2, 5\) must be \(2, 6\)"),
    ],
)
def test_bad_arguments_are_refused(shapes, options, message):
    arrays = {name: jnp.zeros(shape) for name, shape in (GOOD | shapes).items()}
    options = {
        name: jnp.zeros(x, jnp.int32) if isinstance(x, tuple) else x for name, x in options.items()
    }
    with pytest.raises(ValueError, match=message):
        # Call without type checks, as users do.
        inspect.unwrap(flash_attention)(**arrays, **options)


def test_bad_dtypes_are_refused():
    arrays = {name: jnp.zeros(shape) for name, shape in GOOD.items()}
    arrays["k"] = arrays["k"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="same floating dtype, not float32, bfloat16 and float32"):
        inspect.unwrap(flash_attention)(**arrays)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parts_of_the_keys_have_parts_of_the_gradient(implementation, key):
    """With lse and delta of the whole softmax, gradients of two halves of the keys add up."""
    keys = jax.random.split(key, 4)
    q, d_out = (jax.random.normal(k, (2, 12, 4, 8)) for k in keys[:2])
    k, v = (jax.random.normal(k, (2, 16, 2, 8)) for k in keys[2:])
    rules = Rules(causal=True, window=None, softcap=3.0, scale=0.4)
    positions, later = jnp.arange(12) + 2, jnp.arange(16)
    tokens = Tokens(positions, later, None, None)
    out, lse = KERNELS["reference"].attend(AttentionOperands(q, k, v, tokens, rules))
    gradient = OutGradient(d_out, lse, softmax_delta(out, d_out))

    def differentiate(name, part):
        @jax.jit
        def one(k, v, later):
            operands = AttentionOperands(q, k, v, Tokens(positions, later, None, None), rules)
            return KERNELS[name].differentiate(operands, gradient)

        with on_the_cpu(name):
            return one(k[:, part], v[:, part], later[part])

    def loss(q, k, v):
        return jnp.vdot(OPERATION.function("reference")(q, k, v, tokens, rules)[0], d_out)

    whole = jax.grad(loss, (0, 1, 2))(q, k, v)
    for name in ("reference", implementation):
        first, second = (differentiate(name, part) for part in (slice(0, 8), slice(8, 16)))
        parts = (
            first[0] + second[0],
            *(jnp.concatenate(pair, 1) for pair in zip(first[1:], second[1:], strict=True)),
        )
        for ours, theirs in zip(parts, whole, strict=True):
            np.testing.assert_allclose(ours, theirs, **TOLERANCES["float32"])
