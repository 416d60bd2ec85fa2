# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention at every level equals attention on one device, in one program; its permutes; errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.levels.by_level import LevelsConfig, document_degrees
from jaxmoe.execution import ExecutionConfig
from sharding import MeshConfig, make_mesh
from sharding.constrain import Placement
from sharding.fold import MoEMesh, refine
from sharding.rules import DATA_PARALLEL
from sharding.sequence_parallel import (
    AttentionRules,
    NoSequenceParallelConfig,
    TokenOrder,
    attend,
)
from tests.support.hlo_branches import branch_collectives

B, S, N, M, H, RANKS = 2, 32, 4, 2, 6, 8
FORM = LevelsConfig()
DEGREES = (1, 2, 4, 8)


def fold(seq):
    return FORM.mesh_fold(None, seq)


@functools.cache
def mesh():
    return make_mesh(MeshConfig(seq=RANKS), jax.devices()[:RANKS], fold=fold(RANKS))


PLACEMENT = Placement(DATA_PARALLEL.on_fold(refine(MeshConfig(seq=RANKS).by_axis, fold(RANKS))))


def arrays():
    rng = np.random.default_rng(0)
    return tuple(
        jnp.asarray(rng.standard_normal((B, S, heads, H)), jnp.float32) for heads in (N, M, M, N)
    )


def documents(degree):
    """Two documents and padding in every part of `degree` devices."""
    part = S // RANKS * degree
    inner = np.repeat([1, 2, 0], [part // 2 + 1, part - part // 2 - 2, 1])
    starts = 2 * np.arange(RANKS // degree)[:, None]
    row = np.where(inner == 0, 0, inner + starts).reshape(-1)
    return np.stack([row, row]).astype(np.int32)


def laid_out(level):
    """Order of the rows at a level."""
    arrays = {"level": level}
    return TokenOrder(FORM.token_order(S, RANKS, arrays=arrays), arrays)


def loss(config, rules, placement, given, weight, segments, level):
    out, seen = attend(
        *given,
        placement=placement,
        config=config,
        positions=None,
        segment_ids=segments,
        order=None if level is None else laid_out(level),
        rules=rules,
    )
    weight = jnp.where((segments != 0)[..., None, None], weight, 0.0)
    return jnp.sum(out * weight), (out, seen)


@functools.cache
def program(rules):
    """Value, output, watched logits and gradients at any level."""
    function = functools.partial(loss, FORM, rules, PLACEMENT)
    return jax.jit(jax.value_and_grad(function, has_aux=True))


def check_level(level, rules):
    *given, weight = arrays()
    segments = jnp.asarray(documents(DEGREES[level]))
    wanted = jax.jit(
        jax.value_and_grad(
            functools.partial(loss, NoSequenceParallelConfig(), rules, Placement(DATA_PARALLEL)),
            has_aux=True,
        )
    )(tuple(given), weight, segments, None)
    order = np.asarray(laid_out(jnp.int32(level)).tokens)
    back = np.argsort(order)
    laid = jax.tree.map(lambda x: x[:, order], (tuple(given), weight, segments))
    with jax.set_mesh(mesh()):
        found = program(rules)(*laid, jnp.int32(level))
    (value, (out, seen)), gradients = jax.device_get(found)
    (wanted_value, (wanted_out, wanted_seen)), wanted_gradients = jax.device_get(wanted)
    is_real = np.asarray(segments != 0)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    np.testing.assert_allclose(out[:, back][is_real], wanted_out[is_real], atol=1e-6)
    for name, x in seen.items():
        x, y = np.moveaxis(x, 1, 2)[:, back], np.moveaxis(wanted_seen[name], 1, 2)
        np.testing.assert_allclose(x[is_real], y[is_real], atol=1e-5)
    for got, want in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(got[:, back], want, atol=2e-6)


def test_attention_and_gradients_equal_one_device_at_every_level_in_one_program():
    for level in range(len(DEGREES)):
        check_level(level, AttentionRules())
    assert program(AttentionRules())._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("rules", [AttentionRules(window=3, is_observed=True)])
def test_windows_and_watched_logits_at_every_level(rules):
    for level in range(len(DEGREES)):
        check_level(level, rules)


def test_level_of_d_devices_permutes_twice_d_minus_1_times():
    *given, _ = arrays()

    def forward(q, k, v, segments, level):
        return attend(
            q,
            k,
            v,
            placement=PLACEMENT,
            config=FORM,
            positions=None,
            segment_ids=segments,
            order=laid_out(level),
            rules=AttentionRules(),
        )[0]

    with jax.set_mesh(mesh()):
        text = jax.jit(forward).lower(*given, documents(1), jnp.int32(0)).as_text("hlo")
    numbers, sizes = [], []
    for branch in branch_collectives(text):
        permutes = [c for c in branch if c.kind == "collective-permute"]
        numbers.append(len(permutes))
        sizes.append(sum(c.result_bytes for c in permutes))
    assert numbers == [2 * (d - 1) for d in DEGREES]
    held = B * S // RANKS * M * H * 4  # bytes of the keys of a device
    assert sizes[0] == 0
    assert all(size <= 2 * (d - 1) * held for d, size in zip(DEGREES, sizes, strict=True))


def test_form_cuts_the_mesh_and_leaves_an_open_axis():
    execution = ExecutionConfig(mesh=MeshConfig(data=-1, seq=8), sequence_parallel=FORM)
    assert execution.axis_rules.mesh_axes("act_seq_inner") == ("seq_0", "seq_1", "seq_2")
    assert execution.axis_rules.mesh_axes("act_batch") == ("replica", "data", "expert")
    assert FORM.mesh_fold(None, 2) is None  # one piece
    assert FORM.mesh_fold(MoEMesh(expert=4), 8) == MoEMesh(expert=4, seq_cuts=(2, 4))
    assert [document_degrees(LevelsConfig(), n) for n in (1, 2, 8)] == [(1,), (1, 2), (1, 2, 4, 8)]


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (
            MeshConfig(data=1, seq=6),
            "execution.sequence_parallel:levels halves the devices of a sequence again and again,"
            " and execution.mesh.seq=6 must be a power of two: set execution.mesh.seq to a power of"
            " two, or execution.sequence_parallel to ring",
        ),
        (
            MeshConfig(data=1, expert=2, seq=4),
            "mesh.expert=2 and fold.expert=1 both spread experts: set mesh.expert to 1 and"
            " fold.expert to 2",
        ),
    ],
)
def test_refused_meshes(mesh, text):
    with pytest.raises(ValueError) as error:
        _ = ExecutionConfig(mesh=mesh, sequence_parallel=FORM)
    assert str(error.value) == text


def test_a_device_holds_tokens_of_its_part_at_every_level():
    held = S // RANKS
    for level, degree in enumerate(DEGREES):
        order = np.asarray(laid_out(jnp.int32(level)).tokens).reshape(RANKS, held)
        assert sorted(order.reshape(-1).tolist()) == list(range(S))
        parts = order // (degree * held)  # part of each token that a device holds
        assert (parts == np.arange(RANKS)[:, None] // degree).all()
