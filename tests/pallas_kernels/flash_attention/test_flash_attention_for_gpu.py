# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests flash_attention on GPUs: interpreted kernels, the choice of kernel, lowering.

    JAX_PLATFORMS=cuda,cpu pytest -n 0 -m accelerator tests/pallas_kernels   on a GPU

The interpreter of Mosaic GPU models every warpgroup, barrier and copy, and takes seconds per
program: its cases are few and small, and most of them slow.

To add a case: a row in CASES of `tests/pallas_kernels/flash_attention/test_flash_attention.py`.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import kernels, reference
from pallas_kernels.flash_attention.gpu import hopper as pallas_gpu_hopper
from pallas_kernels.flash_attention.gpu import kernels as pallas_gpu
from pallas_kernels.flash_attention.gpu import triton as pallas_gpu_triton
from pallas_kernels.flash_attention.gpu.hopper_tiles import reason_against, tiles_backward
from pallas_kernels.flash_attention.gpu.kernels import kernel_for
from pallas_kernels.flash_attention.mask import Rules, Tokens
from tests.pallas_kernels.flash_attention.test_flash_attention import (
    CASES,
    PACKED,
    RESTARTING,
    TOLERANCES,
    Case,
    _inputs,
)
from tests.support import gpus
from tests.support.gpus import interpreted_gpu

pytestmark = gpus.triton_may_go


def _interpreted(module, interpret):
    return kernels.Kernels(
        functools.partial(module.attend, interpret=interpret),
        functools.partial(module.differentiate, interpret=interpret),
    )


INTERPRETED = {
    "triton": _interpreted(pallas_gpu_triton, True),
    "hopper": _interpreted(pallas_gpu_hopper, interpreted_gpu()),
    "hopper, watched": _interpreted(pallas_gpu_hopper, interpreted_gpu(detect_races=True)),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Shrink tiles so that the shapes of CASES have several."""
    blocks = pallas_gpu_triton._AttentionBlocks
    small = blocks(kept=16, passing=32), blocks(kept=32, passing=16)
    monkeypatch.setattr(pallas_gpu_triton, "_block_sizes", lambda *_: small)


def _arguments(case, width):
    options = {"causal": True, "window": None, "softcap": None, "scale": width**-0.5}
    rules = Rules(**(options | dict(case.options)))
    given = {name: jnp.array(ids, jnp.int32) for name, ids in case.tokens}
    return Tokens(*(given.get(name) for name in Tokens._fields)), rules


# Without optimisation for the plain interpreter's large programs; the oracle's are small.
@functools.partial(
    jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0}
)
def _value_and_gradients(case, name, q, k, v, d_out, d_lse):
    tokens, rules = _arguments(case, q.shape[-1])

    def attend(q, k, v):
        if name == "reference":
            return reference.flash_attention(q, k, v, tokens, rules)
        return kernels.flash_attention(q, k, v, tokens, rules, INTERPRETED[name])

    (out, lse), pull = jax.vjp(attend, q, k, v)
    return out, lse, *pull((d_out, d_lse))


def _assert_parity(case, name):
    inputs = _inputs(case)
    actual = _value_and_gradients(case, name, *inputs)
    expected = _value_and_gradients(case, "reference", *inputs)
    tolerance = TOLERANCES["float32" if case.dtype == "float32" else "bfloat16"]
    for part, x, y in zip(("out", "lse", "d_q", "d_k", "d_v"), actual, expected, strict=True):
        assert x.dtype == y.dtype, part
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        assert part == "lse" or np.all(np.isfinite(x)), part
        np.testing.assert_allclose(x, y, err_msg=part, **tolerance)


FAST = (
    "wide_values",
    "one_query_more_than_a_block",
    "fewer_keys",
    "softcap",
    "window_full",
    "packed",
    "some_see_nothing",
    "all_see_nothing",
    "decoding",
    "bfloat16",
)


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_triton_against_the_oracle(name):
    _assert_parity(CASES[name], "triton")


@pytest.mark.slow
def test_triton_in_float16():
    _assert_parity(dataclasses.replace(CASES["wide_values"], dtype="float16"), "triton")


# Lengths are filled up to 128: with one head and sequence, a program of each kernel.
HOPPER = Case(b=1, n=2, m=1, dtype="bfloat16")
PACKED_HERE = tuple(
    (f"{side}_{what}", values[:1])
    for side in ("q", "kv")
    for what, values in (("segment_ids", PACKED), ("positions", RESTARTING))
)
HOPPER_CASES = {
    "packed": dataclasses.replace(
        HOPPER, tokens=PACKED_HERE, options=(("window", 6), ("softcap", 2.0))
    ),
    "all_see_nothing": dataclasses.replace(
        HOPPER, tokens=(("q_segment_ids", ((1,) * 40,)), ("kv_segment_ids", ((2,) * 40,)))
    ),
    "wide_values": dataclasses.replace(HOPPER, n=1, h=72, hv=8, dtype="float16"),
    "latent": dataclasses.replace(HOPPER, h=192, hv=128),
    "whole_blocks": Case(b=1, n=1, m=1, s=130, u=260, dtype="bfloat16"),
    "two_sequences": Case(
        b=2,
        n=1,
        m=1,
        dtype="bfloat16",
        tokens=(("q_segment_ids", PACKED), ("kv_segment_ids", PACKED)),
    ),
    "window": Case(b=1, n=1, m=1, s=260, u=260, dtype="bfloat16", options=(("window", 70),)),
}


# Their rings are filled again: these cases are watched for races as well.
WATCHED = {
    "whole_blocks_full": Case(
        b=1, n=2, m=1, s=100, u=384, dtype="bfloat16", options=(("causal", False),)
    ),
    "heads_that_wrap_the_ring": Case(b=1, n=5, m=1, s=40, u=130, dtype="bfloat16"),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "packed" else pytest.param(name, marks=pytest.mark.slow)
        for name in HOPPER_CASES
    ],
)
def test_hopper_against_the_oracle(name):
    _assert_parity(HOPPER_CASES[name], "hopper")


@pytest.mark.slow
@pytest.mark.parametrize("name", WATCHED)
def test_hopper_has_no_races(name, capfd):
    _assert_parity(WATCHED[name], "hopper, watched")
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
@gpus.sees_races
def test_a_planted_race_is_seen(monkeypatch, capfd):
    """The race detector reports a planted race."""
    gpus.plant_a_race(monkeypatch)
    # Another scale, so that nothing compiled before is used.
    case = dataclasses.replace(WATCHED["heads_that_wrap_the_ring"], options=(("scale", 0.3),))
    try:
        jax.block_until_ready(_value_and_gradients(case, "hopper, watched", *_inputs(case)))
        said = "".join(capfd.readouterr())
    except jax.errors.JaxRuntimeError as error:  # from JAX 0.12 on
        said = str(error)
    assert "RACE" in said


@pytest.mark.parametrize("name", ["triton", pytest.param("hopper", marks=pytest.mark.slow)])
def test_parts_of_the_keys_have_parts_of_the_gradient(name):
    """With lse and delta of the whole softmax, gradients of two halves of the keys add up."""
    case = dataclasses.replace(HOPPER_CASES["packed"], dtype="float32")
    dtype, kind = ("float32",) * 2 if name == "triton" else ("bfloat16",) * 2
    q, k, v, d_out, _ = (x.astype(dtype) for x in _inputs(case))
    tokens, rules = _arguments(case, case.h)
    out, lse = reference.flash_attention(q, k, v, tokens, rules)
    delta = kernels.softmax_delta(out, d_out)
    gradient = kernels.OutGradient(d_out, lse, delta)
    whole = reference.differentiate(kernels.AttentionOperands(q, k, v, tokens, rules), gradient)

    def part(keys):
        some = Tokens(
            tokens.q_positions,
            tokens.kv_positions[:, keys],
            tokens.q_segment_ids,
            tokens.kv_segment_ids[:, keys],
        )

        @jax.jit
        def run(k, v):
            operands = kernels.AttentionOperands(q, k, v, some, rules)
            return INTERPRETED[name].differentiate(operands, gradient)

        return run(k[:, keys], v[:, keys])

    first, second = part(slice(0, 20)), part(slice(20, 40))
    sums = (
        first[0] + second[0],
        *(jnp.concatenate(pair, 1) for pair in zip(first[1:], second[1:], strict=True)),
    )
    for ours, theirs in zip(sums, whole, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, **TOLERANCES[kind])


@pytest.mark.parametrize(
    ("capability", "dtype", "h", "hv", "backward", "kernel", "reason"),
    [
        ((9, 0), jnp.bfloat16, 128, 128, False, "hopper", "compute capability 9.0 has WGMMA and"),
        ((9, 0), jnp.float16, 192, 128, True, "hopper", "compute capability 9.0 has WGMMA and"),
        ((9, 0), jnp.bfloat16, 256, 256, False, "hopper", "has WGMMA and TMA"),
        ((9, 0), jnp.bfloat16, 256, 256, True, "triton", "do not fit the registers of the backwa"),
        ((9, 0), jnp.float32, 128, 128, False, "triton", "take bfloat16 and float16, not float32"),
        ((9, 0), jnp.bfloat16, 32, 32, False, "triton", "32 wide would fill less than half"),
        ((8, 0), jnp.bfloat16, 128, 128, False, "triton", "8.0 has no WGMMA"),
        ((10, 0), jnp.bfloat16, 128, 128, False, "triton", "10.0 has no WGMMA, which only 9.0"),
        (
            (7, 5),
            jnp.bfloat16,
            128,
            128,
            False,
            "xla",
            "8.0 or later, this is 7.5",
        ),
        ((9, 0), jnp.float64, 128, 128, False, "xla", "no kernel multiplies float64"),
        ((9, 0), jnp.bfloat16, 512, 64, False, "xla", "heads 512 wide are wider than 256"),
        (None, jnp.bfloat16, 128, 128, False, "xla", "this is no NVIDIA GPU"),
    ],
)
def test_kernel_choice(capability, dtype, h, hv, backward, kernel, reason):
    choice = kernel_for(capability, jnp.dtype(dtype), h, hv, backward=backward)
    assert choice.kernel == kernel
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("cuda", "kernel"),
    [(None, "hopper"), (12060, "hopper"), (12080, "triton"), (12090, "triton"), (13000, "hopper")],
)
def test_kernel_choice_by_cuda_version(cuda, kernel):
    choice = kernel_for((9, 0), jnp.dtype("bfloat16"), 128, 128, backward=False, cuda=cuda)
    assert choice.kernel == kernel
    assert kernel == "hopper" or "translates masked loops wrongly" in choice.reason


def test_hopper_tiles_fit_shared_memory():
    """Every width up to 256 has a ring of at least two slots in both passes, or a reason."""
    for h in range(33, 257):
        for hv in (33, 64, 128, 192, 256):
            assert reason_against(jnp.dtype("bfloat16"), h, hv, backward=False) is None
            tiles = tiles_backward(h, hv)
            assert (tiles is None) == (
                reason_against(jnp.dtype("bfloat16"), h, hv, backward=True) is not None
            )
            assert tiles is None or min(one.stages for one in tiles) >= 2


def _described(kind):
    return AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "cuda"))


def _lowered(kind, b, s, n, m, h, hv, dtype, **options):
    def shape(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct(dims, dtype)

    tokens = {name: shape(b, s, dtype=jnp.int32) for name in options.pop("tokens", ())}

    def both(q, k, v, tokens):
        def attend(q, k, v):
            return flash_attention(q, k, v, **tokens, **options, implementation="pallas_gpu")

        (out, lse), pull = jax.vjp(attend, q, k, v)
        return out, lse, pull((out, lse))

    arguments = shape(b, s, n, h), shape(b, s, m, h), shape(b, s, m, hv), tokens
    with jax.sharding.use_abstract_mesh(_described(kind)):
        return jax.jit(both).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


MOSAIC_CALL = "custom_call @mosaic_gpu"
TRITON_CALL = "custom_call @__gpu$xla.gpu.triton"
ALL_TOKENS = ("q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids")
LONG = {"b": 1, "s": 8192, "n": 16, "m": 4, "h": 128, "hv": 128, "dtype": jnp.bfloat16}
PACKED_LONG = LONG | {"b": 2, "window": 1024, "softcap": 30.0, "tokens": ALL_TOKENS}
LATENT = LONG | {"m": 16, "h": 192, "dtype": jnp.float16}


@pytest.mark.parametrize(
    ("kind", "shapes", "mosaic", "triton"),
    [
        ("NVIDIA H200", LONG, 3, 0),
        pytest.param("NVIDIA H200", PACKED_LONG, 3, 0, marks=pytest.mark.slow),
        pytest.param("NVIDIA H200", LATENT, 4, 0, marks=pytest.mark.slow),
        ("NVIDIA H200", LONG | {"h": 256, "hv": 256}, 1, 2),
        ("NVIDIA H200", LONG | {"dtype": jnp.float32}, 0, 3),
        ("NVIDIA H200", PACKED_LONG | {"h": 24, "hv": 24, "s": 1001}, 0, 3),
        ("NVIDIA A100-SXM4-80GB", PACKED_LONG, 0, 3),
        ("NVIDIA A100-SXM4-80GB", LATENT, 0, 3),
    ],
)
def test_lowered_for_a_gpu(kind, shapes, mosaic, triton):
    """The GPU gets three kernels of its family, and no array as large as the scores."""
    text = _lowered(kind, **shapes)
    assert text.count(MOSAIC_CALL) == mosaic
    assert text.count(TRITON_CALL) == triton
    s = shapes["s"]
    assert f"{s}x{s}x" not in text


def test_fallback_warns():
    with pytest.warns(UserWarning, match="XLA runs the (for|back)ward pass .* because heads 51"):
        text = _lowered("NVIDIA H200", **(LONG | {"h": 512, "s": 512}))
    assert "mosaic_gpu" not in text
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "flash_attention")
        _lowered("NVIDIA A100-SXM4-80GB", **(LONG | {"s": 512}))


def test_unsupported_gpu_or_dtype_is_refused():
    q = jnp.zeros((1, 5, 2, 64))
    with pytest.raises(ValueError, match="'pallas_gpu' need a gpu, and this program is for a cpu"):
        pallas_gpu.attend(kernels.AttentionOperands(q, q, q, *_arguments(HOPPER, 64)))
    with pytest.raises(ValueError, match="compute capability of a 'NVIDIA X1' is not known"):
        _lowered("NVIDIA X1", **LONG)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowered_in_shard_map(dtype):
    """Results of kernels vary over the mesh, as check_vma requires."""
    device = AbstractDevice("NVIDIA H200", None, "cuda")
    mesh = AbstractMesh((4,), ("seq",), axis_types=(AxisType.Auto,), abstract_device=device)

    def loss(q, k):
        out, lse = flash_attention(q, k, k, implementation="pallas_gpu")
        return jax.lax.psum(out.astype(jnp.float32).sum() + lse.sum(), "seq")

    q = jax.ShapeDtypeStruct((1, 512, 4, 64), dtype)
    grad = jax.shard_map(
        jax.grad(loss, (0, 1)),
        mesh=mesh,
        in_specs=(P(None, "seq"), P()),
        out_specs=(P(None, "seq"), P()),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(grad).trace(q, q).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(MOSAIC_CALL) == (3 if dtype == "bfloat16" else 0)
    assert text.count(TRITON_CALL) == (0 if dtype == "bfloat16" else 3)


REAL = {
    "causal": (Case(b=2, s=1024, u=1024, n=8, m=2, h=128, hv=128), {}),
    "odd": (Case(b=1, s=777, u=1100, n=4, m=4, h=96, hv=64), {"window": 200, "softcap": 20.0}),
    "latent": (Case(b=1, s=512, u=512, n=4, m=4, h=192, hv=128), {"causal": False}),
    "widest": (Case(b=1, s=512, u=512, n=4, m=2, h=256, hv=256), {}),
    "narrow": (Case(b=2, s=600, u=600, n=4, m=2, h=64, hv=64), {"scale": 0.2}),
}


@pytest.mark.accelerator
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["chosen", "triton"])
@pytest.mark.parametrize("name", REAL)
def test_on_a_gpu(name, family, dtype, has_tokens, monkeypatch):
    """Compiled kernels agree with the float32 reference."""
    if jax.default_backend() != "gpu":
        pytest.skip("these kernels are for GPUs")
    monkeypatch.undo()  # the default tiles
    case, options = REAL[name]
    case = dataclasses.replace(case, dtype=dtype, options=tuple(options.items()))
    q, k, v, d_out, d_lse = _inputs(case)
    tokens, rules = _arguments(case, case.h)
    if has_tokens:
        positions = [case.u - 1 - jnp.arange(length) for length in (case.s, case.u)]
        segments = [
            jnp.broadcast_to(jnp.arange(length) // 300, (case.b, length))
            for length in (case.s, case.u)
        ]
        tokens = Tokens(*positions, *segments)
    ours = pallas_gpu.KERNELS if family == "chosen" else pallas_gpu_triton.KERNELS

    @functools.partial(jax.jit, static_argnums=0)
    def run(ours, q, k, v):
        if ours is None:
            attend = functools.partial(reference.flash_attention, tokens=tokens, rules=rules)
        else:
            attend = lambda q, k, v: kernels.flash_attention(q, k, v, tokens, rules, ours)  # noqa: E731
        (out, lse), pull = jax.vjp(attend, q, k, v)
        return out, lse, *pull((d_out.astype(out.dtype), d_lse))

    with jax.default_matmul_precision("highest"):
        expected = run(None, *(x.astype(jnp.float32) for x in (q, k, v)))
    for part, x, y in zip(
        ("out", "lse", "d_q", "d_k", "d_v"), run(ours, q, k, v), expected, strict=True
    ):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        seen = np.isfinite(y)
        assert seen.mean() > 0.4, part
        np.testing.assert_array_equal(np.isfinite(x), seen, err_msg=part)
        x, y = (np.where(seen, z, 0.0) for z in (x, y))  # where a query sees no key, both are -inf
        error = np.abs(x - y)
        scale = max(1.0, np.abs(y).max(initial=0.0, where=seen))
        # Two roundings of weights and of scores' gradients, relative to the largest.
        assert error.max() <= scale * (3e-2 if dtype != "float32" else 1e-4), part
