# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages against rows that are held whole, and against JAX's reference of its kernel.

JAX's reference (`ref_ragged_paged_attention`) is code of others for the same layout of pages.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernel_of_jax
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import flash_attention
from pallas_kernels.interpreter import interpret_kernels
from sharding.sequence_parallel import AttentionRules, PageTables
from sharding.sequence_parallel.paged import attend_pages, check_causal, write_pages
from tests.support.tolerances import assert_close
from tests.support.tpus import described_tpus

LAYERS, PAGES, SIZE, WIDTH, LAYER = 2, 12, 4, 4, 1
SINGLES, PIECES, LENGTH = 3, 2, 5
# Positions before the new tokens, and new tokens: three singles and two pieces, one not full.
BEFORE, NEW = (0, 7, 14), (1, 1, 1)
PIECE_BEFORE, PIECE_NEW = (0, 6), (5, 3)


def arrays(heads=(4, 2), width=8, dtype=jnp.float32):
    """Return (rows k and v of each sequence, queries, pool with what came before, tables, ...)."""
    rng = np.random.default_rng(0)
    pages = rng.permutation(PAGES)
    owned = (pages[:1], pages[1:3], pages[3:7], pages[7:9], pages[9:12])
    before, new = (*BEFORE, *PIECE_BEFORE), (*NEW, *PIECE_NEW)
    shape = (WIDTH * SIZE, heads[1], 2, width)
    rows = [jnp.asarray(rng.normal(size=shape), dtype) for _ in before]
    pool = np.asarray(rng.normal(size=(LAYERS, PAGES, SIZE, heads[1], 2, width)), np.float32)
    length = SINGLES + PIECES * LENGTH
    slots, positions = np.full(length, PAGES * SIZE, np.int32), np.full(length, -1, np.int32)
    fresh = np.zeros((length, heads[1], 2, width), np.float32)
    table = np.zeros((len(before), WIDTH), np.int32)
    for number, (row, first, count, pages) in enumerate(zip(rows, before, new, owned, strict=True)):
        table[number, : len(pages)] = pages
        for place in range(first):
            pool[LAYER, pages[place // SIZE], place % SIZE] = row[place]
        at = number if number < SINGLES else SINGLES + (number - SINGLES) * LENGTH
        places = np.arange(first, first + count)
        slots[at : at + count] = pages[places // SIZE] * SIZE + places % SIZE
        positions[at : at + count] = places
        fresh[at : at + count] = row[first : first + count]
    q = jnp.asarray(rng.normal(size=(length, heads[0], width)), dtype)
    split = PageTables(slots, table[:SINGLES], table[SINGLES:])
    return rows, q, jnp.asarray(pool, dtype), split, positions, jnp.asarray(fresh, dtype)


@functools.cache
def computed(rules, heads=(4, 2), width=8, dtype=jnp.float32):
    rows, q, pool, tables, positions, fresh = arrays(heads, width, dtype)

    @jax.jit
    def run(pool, fresh, tables, positions, q):
        kv = write_pages(pool, fresh, jnp.int32(LAYER), tables.slots)
        return attend_pages(q, kv, jnp.int32(LAYER), tables, positions, rules), kv

    return *run(pool, fresh, tables, positions, q), rows, q, pool, tables, positions


def parts(positions):
    """The tokens of each sequence in the row, and the positions after the last."""
    starts = [*range(SINGLES), *(SINGLES + LENGTH * number for number in range(PIECES))]
    for start, count in zip(starts, (*NEW, *PIECE_NEW), strict=True):
        yield slice(start, start + count), int(positions[start]) + count


RULES = (
    AttentionRules(),
    AttentionRules(window=5, scale=0.7),
    AttentionRules(softcap=3.0, implementation="xla"),
)
CHUNKED = tuple(AttentionRules(chunk=3, implementation=name) for name in (None, "reference"))


@pytest.mark.parametrize("rules", (*RULES, *CHUNKED))
def test_pages_equal_rows_held_whole(rules):
    out, kv, rows, q, pool, tables, positions = computed(rules)
    for (part, end), row in zip(parts(positions), rows, strict=True):
        given = {"window": rules.window, "softcap": rules.softcap, "scale": rules.scale}
        k, v = row[None, :end, :, 0], row[None, :end, :, 1]
        where = jnp.asarray(positions[None, part])
        if rules.chunk is not None:
            given["q_segment_ids"] = where // rules.chunk
            given["kv_segment_ids"] = jnp.arange(end, dtype=jnp.int32)[None] // rules.chunk
        wanted = flash_attention(
            q[None, part], k, v, q_positions=where, **given, implementation="reference"
        )[0][0]
        assert_close(out[part], wanted, "attention")
    is_padding = positions < 0
    assert (np.asarray(out)[is_padding] == 0.0).all() and is_padding.any()
    np.testing.assert_array_equal(kv[1 - LAYER], pool[1 - LAYER])
    written = np.zeros(PAGES * SIZE, bool)
    written[tables.slots[tables.slots < PAGES * SIZE]] = True
    after, before = (np.asarray(one[LAYER]).reshape(PAGES * SIZE, -1) for one in (kv, pool))
    np.testing.assert_array_equal((after != before).any(-1), written)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_pages_return_the_log_sum_exp_of_rows_held_whole(implementation):
    rules = AttentionRules(window=5, softcap=3.0, keeps_lse=True, implementation=implementation)
    (out, lse), _, rows, q, _, _, positions = computed(rules)
    plain = computed(dataclasses.replace(rules, keeps_lse=False))[0]
    np.testing.assert_array_equal(out, plain)
    for (part, end), row in zip(parts(positions), rows, strict=True):
        k, v = row[None, :end, :, 0], row[None, :end, :, 1]
        where = jnp.asarray(positions[None, part])
        mask = {"window": 5, "softcap": 3.0, "implementation": "reference"}
        wanted = flash_attention(q[None, part], k, v, q_positions=where, **mask)[1][0].T
        assert_close(lse[part], wanted, "attention")
    assert (np.asarray(lse)[positions < 0] == -np.inf).all()


def test_kernels_that_return_no_log_sum_exp_are_refused():
    rules = AttentionRules(keeps_lse=True, implementation="pallas_gpu")
    with pytest.raises(
        ValueError, match="returns no log-sum-exp.*execution.kernels.attention to xla"
    ):
        computed(rules)


def test_kernels_without_chunks_are_refused():
    rules = AttentionRules(chunk=4, implementation="pallas_gpu")
    with pytest.raises(ValueError, match="has no chunks .chunk=4.*kernels.attention to xla"):
        computed(rules)


@pytest.mark.parametrize("rules", RULES)
def test_pages_equal_the_reference_of_jax(rules):
    out, kv, _, q, _, tables, positions = computed(rules)
    table = np.concatenate([tables.singles, tables.pieces])
    ends = np.asarray([end for _, end in parts(positions)], np.int32)
    chosen = np.concatenate([np.arange(len(q))[part] for part, _ in parts(positions)])
    starts = np.cumsum([0, *NEW, *PIECE_NEW]).astype(np.int32)
    pages = kv[LAYER].reshape(PAGES, SIZE, -1, kv.shape[-1])  # K and V of a head alternate
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        wanted = ref_ragged_paged_attention(
            q[chosen],
            pages,
            ends,
            table,
            starts,
            np.asarray([len(ends)], np.int32),
            sm_scale=rules.scale or q.shape[-1] ** -0.5,
            sliding_window=rules.window,
            soft_cap=rules.softcap,
        )
    assert_close(out[chosen], wanted, "attention")


def test_kernel_for_tpus_gets_arguments_that_mean_the_same(monkeypatch):
    """JAX's reference in place of its kernel, which no interpreter runs."""

    def reference(*given, num_kv_pages_per_block, num_queries_per_block, **rules):
        assert num_kv_pages_per_block > 0 and num_queries_per_block > 0
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return ref_ragged_paged_attention(*given, **rules)

    monkeypatch.setattr(kernel_of_jax, "ragged_paged_attention", reference)
    rules = AttentionRules(window=7, softcap=4.0)
    wanted, kv, _, q, _, tables, positions = computed(rules, width=128)
    given = jax.tree.map(jnp.asarray, (tables, positions))
    with interpret_kernels():
        asked = dataclasses.replace(rules, implementation="pallas_tpu")
        out = attend_pages(q, kv, jnp.int32(LAYER), *given, asked)
        chosen = attend_pages(q, kv, jnp.int32(LAYER), *given, rules)
    is_read = positions >= 0
    assert_close(np.asarray(out)[is_read], np.asarray(wanted)[is_read], "attention")
    np.testing.assert_array_equal(out, chosen, "the kernel is the first choice on a TPU")


@pytest.mark.slow
def test_kernel_compiles_for_a_tpu(monkeypatch):
    """It reads the pages where they are: no copy of the pool."""
    devices = described_tpus(monkeypatch, "v5e:2x4")
    mesh = Mesh(np.array(devices[:1]), ("x",), (AxisType.Auto,))
    here = NamedSharding(mesh, PartitionSpec())
    tables = PageTables(*(np.zeros(s, np.int32) for s in ((8 + 64,), (8, 16), (1, 16))))
    pool, q = np.zeros((2, 256, 16, 4, 2, 128), jnp.bfloat16), np.zeros((72, 16, 128), jnp.bfloat16)
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=here),
        (q, pool, np.int32(0), tables, np.zeros(72, np.int32)),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = jax.jit(lambda *given: attend_pages(*given, AttentionRules(window=64)))
        compiled = run.lower(*given).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert memory.temp_size_in_bytes < pool.nbytes / 10


def test_a_kernel_that_does_not_take_the_sizes_is_an_error_with_the_field():
    _, q, pool, tables, positions, _ = arrays()
    tables, positions = jax.tree.map(jnp.asarray, (tables, positions))
    given = (q, pool, jnp.int32(0), tables, positions)
    with (
        interpret_kernels(),
        pytest.raises(ValueError, match="set execution.kernels.attention to xla"),
    ):
        attend_pages(*given, AttentionRules(implementation="pallas_tpu"))
    with pytest.raises(ValueError, match="attention=pallas_gpu: .* needs a gpu and"):
        attend_pages(*given, AttentionRules(implementation="pallas_gpu"))


def test_attention_that_is_not_causal_is_refused():
    with pytest.raises(ValueError, match="pages serve causal attention only"):
        check_causal(AttentionRules(is_causal=False))
