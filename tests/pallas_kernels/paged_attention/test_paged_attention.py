# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages: every implementation that runs on the CPU against the reference, the GPU's
kernel interpreted, and what it is lowered to.

    JAX_PLATFORMS=cuda,cpu pytest -n 0 -m accelerator tests/pallas_kernels   on a GPU

Tables name pages in any order. Slots that no query sees, pages that no table names, and queries of
empty sequences hold NaN. Sequence 0 is empty, sequence 1 fills its table.

To add a case: a row in CASES.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import OPERATIONS, flash_attention, paged_attention, quantize
from pallas_kernels.paged_attention import gpu, tpu
from pallas_kernels.paged_attention.arguments import Tables, check_arguments, rules_of
from tests.support import gpus

pytestmark = gpus.triton_may_go

LAYERS, LAYER = 2, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, and options of paged_attention."""

    singles: int = 3
    pieces: int = 2
    length: int = 5
    page: int = 16
    table: int = 6
    heads: tuple[int, int] = (4, 2)
    width: int = 32
    dtype: str = "float32"
    few: tuple[str, int] | None = None
    """Format of pages of few bits, and features that share a scale."""
    options: tuple[tuple[str, float], ...] = ()


CASES = {
    "grouped": Case(),
    "window": Case(page=5, width=24, options=(("window", 7), ("scale", 0.3))),
    "large_pages": Case(page=64, table=3, dtype="bfloat16", options=(("softcap", 3.0),)),
    "one_head_each": Case(heads=(2, 2), width=64, pieces=0),
    "chunks": Case(page=5, width=24, options=(("chunk", 7),)),
    "many_queries": Case(singles=0, length=40, options=(("window", 30),)),
    "int8": Case(few=("int8", 16), options=(("window", 50),)),
    "int8_odd": Case(few=("int8", 12), width=24, dtype="bfloat16"),
}
FAST = ("window", "large_pages", "int8")
TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2}


@functools.cache
def arguments(case):
    """Return (q, pool, layer, singles, pieces, positions)."""
    rng = np.random.default_rng(0)
    rows, slots = case.singles + case.pieces, case.table * case.page
    pages, (heads, held) = rows * case.table + 3, case.heads
    lengths = rng.integers(1, slots + 1, rows)
    lengths[0], lengths[1] = 0, slots
    order = rng.permutation(pages)[: rows * case.table].reshape(rows, case.table)
    pool = rng.normal(size=(LAYERS, pages, case.page, held, 2, case.width)).astype(np.float32)
    seen, positions = np.zeros((LAYERS, pages, case.page), bool), []
    table = np.full((rows, case.table), pages + 7, np.int32)
    for row, (own, length) in enumerate(zip(order, lengths, strict=True)):
        is_single = row < case.singles
        new = min(length, 1 if is_single else case.length - (row - case.singles))
        positions += [*range(length - new, length)]
        positions += [-1] * ((1 if is_single else case.length) - new)
        window = dict(case.options).get("window", slots)
        place = np.arange(max(length - new - window + 1, 0), length)
        table[row, place // case.page] = own[place // case.page]
        seen[LAYER, own[place // case.page], place % case.page] = True
    pool[~seen] = np.nan
    q = rng.normal(size=(len(positions), heads, case.width))
    q[np.asarray(positions) < 0] = np.nan
    q, pool = jnp.asarray(q, case.dtype), jnp.asarray(pool, case.dtype)
    if case.few is not None:
        form, block = case.few
        pool = quantize(jnp.nan_to_num(pool), form, axis=-1, block_size=block)
    tables = (jnp.asarray(part) for part in (table[: case.singles], table[case.singles :]))
    return q, pool, jnp.int32(LAYER), *tables, jnp.asarray(positions, jnp.int32)


def attend(case, implementation, *given):
    return paged_attention(*given, **dict(case.options), implementation=implementation)


@functools.partial(
    jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0}
)
def interpreted(case, programs, q, pool, layer, singles, pieces, positions):
    assert gpu._PROGRAMS == programs  # while it is traced
    options = dict(case.options)
    window, softcap, scale = (options.get(name) for name in ("window", "softcap", "scale"))
    rules = rules_of(q, window, softcap, scale, "pallas_gpu")
    tables = Tables(singles, pieces)
    return gpu.paged_attention(q, pool, layer, tables, positions, rules, interpret=True)


@functools.cache
def wanted(case):
    run = jax.jit(functools.partial(attend, case, "reference"))
    return np.asarray(run(*arguments(case)), np.float32)


def check(found, case):
    assert found.dtype == case.dtype
    found, right = np.asarray(found, np.float32), wanted(case)
    assert np.isfinite(found).all() and np.abs(right).max() > 0.5
    np.testing.assert_allclose(found, right, atol=TOLERANCES[case.dtype], rtol=0)


@pytest.mark.parametrize("name", ["window", "large_pages", "many_queries"])
def test_the_reference_is_attention_to_the_row_of_a_sequence(name):
    case = CASES[name]
    q, pool, _, singles, pieces, positions = arguments(case)
    out, tables = wanted(case), [*singles, *pieces]
    for row in {1, len(tables) - 1}:
        is_single = row < case.singles
        first = row if is_single else case.singles + (row - case.singles) * case.length
        at = np.arange(first, first + (1 if is_single else case.length))
        at = at[positions[at] >= 0]
        held = jnp.nan_to_num(jnp.asarray(pool)[LAYER, tables[row]])
        held = held.reshape(case.table * case.page, *held.shape[2:])
        held = held[None, : int(positions[at[-1]]) + 1]
        options = dict(case.options) | {"q_positions": positions[at]}
        attend_to = jax.jit(
            lambda q, k, v, options=options: flash_attention(
                q, k, v, **options, implementation="reference"
            )[0][0]
        )
        right = attend_to(q[None, at], held[..., 0, :], held[..., 1, :])
        np.testing.assert_allclose(
            out[at], np.asarray(right, np.float32), atol=TOLERANCES[case.dtype]
        )
    assert (out[np.asarray(positions) < 0] == 0.0).all()


@pytest.mark.parametrize("programs", [1, 512])
@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
        if name != "chunks"
    ],
)
def test_triton_against_the_reference(monkeypatch, name, programs):
    """With keys split over programs and without."""
    monkeypatch.setattr(gpu, "_PROGRAMS", programs)
    check(interpreted(CASES[name], programs, *arguments(CASES[name])), CASES[name])


@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_tpu"])
def test_kernels_refuse_chunks(implementation):
    with pytest.raises(ValueError, match=r"has no chunks \(chunk=7\): choose 'xla'"):
        attend(CASES["chunks"], implementation, *arguments(CASES["chunks"]))


@pytest.mark.parametrize("name", CASES)
def test_xla_against_the_reference(name):
    """It multiplies what is hidden by 0, so that pages must hold numbers: they always do."""
    q, pool, *rest = arguments(CASES[name])
    found = attend(CASES[name], "xla", *jax.tree.map(jnp.nan_to_num, (q, pool)), *rest)
    check(found, CASES[name])


@pytest.mark.parametrize(
    ("width", "dtype", "held", "limit"),
    [
        (128, "bfloat16", "bfloat16", None),
        (256, "float32", "float32", None),
        (80, "bfloat16", "int8", None),
        (128, "bfloat16", "int4", "pages of int4"),
        (288, "bfloat16", "bfloat16", "heads 288 wide, which are wider than 256"),
        (128, "float64", "float32", "queries in float64"),
        (128, "bfloat16", "float8_e5m2", "pages in float8_e5m2"),
    ],
)
def test_limits_of_the_kernel_for_gpus_are_named(width, dtype, held, limit):
    q = jax.ShapeDtypeStruct((4, 8, width), np.dtype(dtype))
    pool = jax.ShapeDtypeStruct((2, 3, 16, 4, 2, width), "bfloat16")
    if held in ("int8", "int4"):
        pool = jax.eval_shape(lambda x: quantize(x, held, axis=-1, block_size=16), pool)
    else:
        pool = jax.ShapeDtypeStruct(pool.shape, held)
    assert gpu.reason_against(q, pool) == limit


def test_limits_of_the_kernel_for_tpus_are_named():
    def why(width, heads, dtype):
        pool = jnp.zeros((1, 2, 4, heads, 2, width), dtype)
        return tpu.reason_against(jnp.zeros((1, heads, width), dtype), pool)

    assert why(128, 2, jnp.bfloat16) is None and why(256, 8, jnp.float32) is None
    assert "multiple of 128" in str(why(64, 2, jnp.float32))
    assert "3 key heads" in str(why(128, 3, jnp.float32))


def test_arguments_that_do_not_fit_are_refused():
    q, pool, _, singles, pieces, positions = arguments(CASES["grouped"])
    for given, words in (
        ((q[..., :8], pool, Tables(singles, pieces), positions), "must be as wide"),
        ((q[:-1], pool, Tables(singles, pieces), positions), "do not make the 12 queries"),
        ((q, pool, Tables(singles, pieces[:, 1:]), positions), "not 6 and 5"),
        ((q.astype(int), pool, Tables(singles, pieces), positions), "must be floating"),
    ):
        with pytest.raises(ValueError, match=words):
            check_arguments(*given)
    for options, words in (((0, None), "window=0 must be"), ((None, 0.0), "softcap=0.0 must be")):
        with pytest.raises(ValueError, match=words):
            rules_of(q, *options, None, None)


def lowered(kind, case, implementation):
    def shape(*dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype)

    tokens, (heads, held) = case.singles + case.pieces * case.length, case.heads
    pool = shape(8, 4096, case.page, held, 2, case.width, dtype=case.dtype)
    if case.few is not None:
        form, block = case.few
        pool = jax.eval_shape(lambda x: quantize(x, form, axis=-1, block_size=block), pool)
    tables = (shape(rows, case.table) for rows in (case.singles, case.pieces))
    q = shape(tokens, heads, case.width, dtype=case.dtype)
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "cuda"))
    with jax.sharding.use_abstract_mesh(mesh):
        run = jax.jit(functools.partial(attend, case, implementation))
        traced = run.trace(q, pool, shape(), *tables, shape(tokens))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


TRITON_CALL = "custom_call @__gpu$xla.gpu.triton"
REAL = Case(heads=(32, 4), width=128, dtype="bfloat16", length=64, table=64)


@pytest.mark.parametrize("implementation", [None, "pallas_gpu"])
@pytest.mark.parametrize(
    ("kind", "case", "kernels"),
    [
        ("NVIDIA H200", REAL, 4),
        ("NVIDIA A100-SXM4-80GB", REAL, 4),
        ("NVIDIA H200", dataclasses.replace(REAL, pieces=0, singles=200), 1),
        ("NVIDIA H200", dataclasses.replace(REAL, dtype="float32", width=96), 4),
        ("NVIDIA H200", dataclasses.replace(REAL, few=("int8", 64)), 4),
    ],
)
def test_lowered_for_a_gpu(kind, case, kernels, implementation):
    """The kernel, and the one that merges; no array of gathered keys."""
    text = lowered(kind, case, implementation)
    assert text.count(TRITON_CALL) == kernels
    assert f"{case.table * case.page}x{case.heads[1]}x" not in text


def test_what_the_kernel_does_not_take_is_left_to_xla():
    case = dataclasses.replace(REAL, few=("int4", 64), table=4)
    assert 'name = "paged_attention' not in lowered("NVIDIA H200", case, None)
    assert 'name = "paged_attention' in lowered("NVIDIA H200", REAL, None)
    with pytest.raises(ValueError, match="does not run for this: pages of int4: choose 'xla'"):
        lowered("NVIDIA H200", case, "pallas_gpu")
    assert TRITON_CALL not in lowered("Tesla V100", dataclasses.replace(REAL, table=4), None)
    with pytest.raises(ValueError, match="8.0 or later"):
        lowered("Tesla V100", dataclasses.replace(REAL, table=4), "pallas_gpu")


def test_int8_pages_whose_offsets_would_overflow_are_refused():
    q = jax.ShapeDtypeStruct((1, 8, 128), "bfloat16")
    for pages, is_refused in ((2**15, False), (2**19, True), (2**20 + 1, False)):
        pool = jax.eval_shape(
            lambda x: quantize(x, "int8", axis=-1, block_size=64),
            jax.ShapeDtypeStruct((1, pages, 16, 1, 2, 128), "bfloat16"),
        )
        limit = gpu.reason_against(q, pool)
        assert (limit is not None) == is_refused
        assert limit is None or "between 2 and 4 GiB" in limit


def test_lowered_in_shard_map():
    """Heads are cut; results of kernels vary over the mesh, as check_vma requires."""
    device = AbstractDevice("NVIDIA H200", None, "cuda")
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    q, pool, *rest = arguments(CASES["grouped"])
    heads = P(None, "x"), P(None, None, None, "x"), P(), P(), P(), P()
    run = jax.shard_map(
        functools.partial(attend, CASES["grouped"], None),
        mesh=mesh,
        in_specs=heads,
        out_specs=P(None, "x"),
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (q, pool, *rest))
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(TRITON_CALL) == 4


def test_a_kernel_that_is_not_read_may_be_dropped():
    """Jax 0.11 drops no `pallas_call`, and flax's loop over layers refuses what is not dropped."""
    case = CASES["grouped"]
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", None, "cuda"))
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(functools.partial(attend, case, "pallas_gpu"))(*arguments(case))
    assert "pallas_call" in str(jaxpr)
    assert [one for one in jaxpr.eqns if one.primitive.name == "pallas_call"] == []


def test_it_has_no_gradient():
    q, *rest = arguments(CASES["grouped"])
    with pytest.raises(ValueError, match="paged_attention has no gradient"):
        jax.grad(lambda q: attend(CASES["grouped"], None, q, *rest).sum())(q)


def test_implementations():
    names = {"reference", "xla", "pallas_tpu", "pallas_gpu"}
    assert set(OPERATIONS["paged_attention"].implementations) == names
    assert OPERATIONS["paged_attention"].choose().implementation == "xla"


@pytest.mark.accelerator
@pytest.mark.parametrize("programs", [1, 512])
@pytest.mark.parametrize("name", [*CASES, "real"])
def test_on_a_gpu(monkeypatch, name, programs):
    """The compiled kernel agrees with the reference."""
    if jax.default_backend() != "gpu":
        pytest.skip("this kernel is for GPUs")
    monkeypatch.setattr(gpu, "_PROGRAMS", programs)
    case = (CASES | {"real": REAL})[name]
    run = jax.jit(functools.partial(attend, case, "pallas_gpu"))
    found = run(*arguments(case))
    assert np.isfinite(np.asarray(found, np.float32)).all()
    np.testing.assert_allclose(
        np.asarray(found, np.float32), wanted(case), atol=max(2e-5, TOLERANCES[case.dtype]), rtol=0
    )
