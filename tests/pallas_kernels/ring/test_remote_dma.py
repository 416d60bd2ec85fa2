# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests TPU kernels that send while they compute: equal to XLA's collectives, without races.

They run on four CPU devices that model TPUs, in separate processes
(tests/support/remote_dma_cases.py), and are compiled for described TPUs.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import ring_attention, token_ring_attention
from pallas_kernels.flash_attention import xla
from pallas_kernels.flash_attention.api import KERNELS
from pallas_kernels.flash_attention.kernels import AttentionOperands, OutGradient, softmax_delta
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.interpreter import interpret_kernels
from pallas_kernels.ring.parcel import Parcel
from pallas_kernels.ring.remote_dma import ring_backward, ring_forward
from pallas_kernels.ring.remote_dma.ring_backward import differentiate_ring
from pallas_kernels.ring.remote_dma.ring_forward import attend_ring
from pallas_kernels.ring.remote_dma.transfer import Sender, collective_id
from pallas_kernels.ring.step import (
    Links,
    attend_and_send,
    check_transport,
    differentiate_and_send,
    send,
)
from tests.support.remote_dma_cases import CASES, outcome
from tests.support.tpus import described_tpus

slow = pytest.mark.slow


BOTH = "eager,on_wait"
MODES = {
    "transfer": BOTH,
    "rows": BOTH,
    "blocks": BOTH,
    "ring": BOTH,
    "ring_of_tiles": "eager",
    "ring_attention": BOTH,
    "token_ring_attention": BOTH,
    # The same kernels under other schedules: once in each mode.
    "ring_attention_by_steps": "on_wait",
    "ring_attention_both_ways": "eager",
    "token_ring_attention_co_travelling": "on_wait",
}


def test_every_case_has_its_modes():
    assert set(MODES) == set(CASES)


@pytest.mark.parametrize(
    "case", ["transfer", *(pytest.param(case, marks=slow) for case in CASES if case != "transfer")]
)
def test_equal_to_collectives_and_silent(case):
    found = outcome(case, MODES[case])
    assert found.is_clean, found.text


def test_a_forgotten_wait_is_a_race():
    found = outcome("transfer", "eager", "arrivals")
    assert found.is_race, found.text
    assert not found.is_clean


@slow
def test_a_forgotten_wait_leaves_nothing_in_the_buffer():
    """A copy made at the latest moment is never made without a wait."""
    found = outcome("transfer", "on_wait", "arrivals")
    assert not found.has_passed, found.text


@slow
def test_a_copy_into_a_kernel_that_has_not_begun_fails():
    found = outcome("transfer", "eager", "meeting")
    assert not found.has_passed, found.text
    assert "KeyError" in found.text  # no such buffer


@slow
def test_leaving_before_the_others_have_passed_is_noticed():
    found = outcome("transfer", "eager", "passing")
    assert found.has_left_over, found.text
    assert not found.is_clean


@slow
@pytest.mark.parametrize("fault", ["capacity", "sums"])
@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_a_forgotten_capacity_semaphore_is_a_race(mode, fault):
    """Values may be right by chance; the race is reported."""
    found = outcome("ring", mode, fault)
    assert found.is_race, found.text
    assert not found.is_clean


def _parcel(size: int) -> Parcel:
    return Parcel(jnp.zeros(size), ((0, 1),))


def test_bytes_are_shared_out_between_kernels():
    sender = Sender([_parcel(size) for size in (5, 1, 3, 2)], "seq", num_kernels=2)
    assert [sorted(share) for share in sender._shares] == [[0, 1], [2, 3]]


def test_axes_meet_at_different_barriers():
    assert collective_id("seq") == collective_id("seq")
    assert len({collective_id(axis) for axis in ("seq", "expert", "data", "tensor")}) == 4


def test_without_tpu_remote_dma_is_refused():
    with pytest.raises(ValueError, match="here: transport='remote_dma' needs TPUs, .* for cpu"):
        check_transport("here", "remote_dma", KERNELS["pallas_tpu"])
    check_transport("here", "ppermute", xla.KERNELS)
    with interpret_kernels():
        check_transport("here", "remote_dma", KERNELS["pallas_tpu"])


def test_other_implementations_are_refused():
    with (
        interpret_kernels(),
        pytest.raises(ValueError, match="from within the kernels of implementation='pallas_tpu'"),
    ):
        check_transport("here", "remote_dma", xla.KERNELS)


def test_unknown_transports_are_refused():
    with pytest.raises(ValueError, match="'pigeons' must be one of 'ppermute', 'remote_dma'"):
        # Call without type checks, as users do.
        inspect.unwrap(check_transport)("here", "pigeons", xla.KERNELS)


@pytest.fixture(params=["v5e:2x4", "v5e:4x4"])
def mesh(request, monkeypatch):
    """Return a mesh of all chips in a row."""
    devices = described_tpus(monkeypatch, request.param)
    return Mesh(np.array(devices), ("seq",), (AxisType.Auto,))


STEP = ("flash_attention_d_keys_and_send", "flash_attention_d_queries_and_send", "parcels_and_send")


def _compiled(mesh, local, *shapes, dtype=jnp.bfloat16, check_vma=True) -> str:
    spec = PartitionSpec(None, "seq")
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape in shapes
    ]
    region = jax.shard_map(
        lambda *arrays: jax.tree.map(lambda x: x[None], local(*arrays)),
        mesh=mesh,
        in_specs=spec,
        out_specs=PartitionSpec("seq"),
        check_vma=check_vma,
    )
    return jax.jit(region).lower(*given).compile().as_text() or ""


def _kernels(text: str) -> list[str]:
    """Return the names of the kernels of a compiled program, without numbers."""
    lines = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    found = [line.split("=")[0].split("%")[1].strip().rstrip("0123456789.") for line in lines]
    for line, name in zip(lines, found, strict=True):
        sends = "_and_send" in name or "_ring" in name
        assert ("custom_call_has_side_effect=true" in line) == sends, name
    return sorted(found)


@slow
@pytest.mark.parametrize(("width", "dtype"), [(128, jnp.float32), (64, jnp.bfloat16)])
def test_blocks_for_tpus(mesh, width, dtype):
    ranks = mesh.size
    rules = Rules(causal=True, window=None, softcap=None, scale=width**-0.5)

    def step(q, k, v):
        links = Links("seq", "remote_dma", KERNELS["pallas_tpu"])
        operands = AttentionOperands(q, k, v, Tokens(None, None, None, None), rules)
        parcels = [
            Parcel(k, tuple((i, (i + 1) % ranks) for i in range(ranks))),
            Parcel(v, ((1, 0), (3, 2))),
            Parcel(q[:, :, 0, 0], ((0, 2),)),
        ]
        state, arrived = attend_and_send(operands, parcels, links)
        delta = softmax_delta(state.out, state.out)
        gradient = OutGradient(state.out, state.lse, delta)
        gradients, again = differentiate_and_send(operands, gradient, parcels, links)
        return state, arrived, gradients, again, send(parcels, "seq", "remote_dma")

    shapes = [(1, 32 * ranks, heads, width) for heads in (4, 2, 2)]
    text = _compiled(mesh, step, *shapes, dtype=dtype)
    assert _kernels(text) == [
        "flash_attention_and_send",
        "flash_attention_d_keys_and_send",
        "flash_attention_d_queries_and_send",
        "parcels_and_send",
    ]
    assert "collective-permute" not in text


@slow
@pytest.mark.parametrize("has_segments", [False, True])
def test_the_ring_for_tpus(mesh, has_segments):
    """Eight heads of 2048 tokens on a chip: many tiles."""
    rules = Rules(causal=True, window=None, softcap=None, scale=128**-0.5)

    def whole(q, k, v):
        rank = jax.lax.axis_index("seq")
        positions = (rank * q.shape[1] + jnp.arange(q.shape[1]))[None]
        segment_ids = positions // 100 if has_segments else None
        tokens = Tokens(positions, positions, segment_ids, segment_ids)
        assert ring_forward.fits(q, k, v, rules) and ring_backward.fits(q, k, v, rules)
        operands = AttentionOperands(q, k, v, tokens, rules)
        out, lse = attend_ring(operands, axis_name="seq")
        gradient = OutGradient(out, lse, softmax_delta(out, out))
        return out, lse, differentiate_ring(operands, gradient, axis_name="seq")

    shapes = [(1, 2048 * mesh.size, heads, 128) for heads in (8, 2, 2)]
    text = _compiled(mesh, whole, *shapes)
    assert _kernels(text) == ["attend_ring", "differentiate_ring"]
    assert "collective-permute" not in text


def test_long_sequences_do_not_fit_one_kernel():
    rules = Rules(causal=True, window=None, softcap=None, scale=1.0)
    q, k = (jnp.zeros((1, 16384, heads, 128), jnp.bfloat16) for heads in (8, 2))
    assert not ring_backward.fits(q, k, k, rules)
    assert ring_backward.fits(q[:, :2048], k[:, :2048], k[:, :2048], rules)


OPERATIONS = {
    "ring_attention": (ring_attention, {}, ["attend_ring", "differentiate_ring"]),
    "ring_attention_by_steps": (
        ring_attention,
        {"layout": "contiguous"},
        ["flash_attention_and_send", *STEP],
    ),
    "token_ring_attention": (token_ring_attention, {}, ["flash_attention_and_send", *STEP]),
}


@slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_for_tpus(mesh, name):
    """Forward and backward send every byte by a kernel's own copy."""
    operation, options, expected = OPERATIONS[name]

    def value_and_gradients(q, k, v):
        def attend(q, k, v):
            return operation(q, k, v, axis_name="seq", transport="remote_dma", **options)

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(out)

    shapes = [(1, 256 * mesh.size, heads, 128) for heads in (4, 2, 2)]
    text = _compiled(mesh, value_and_gradients, *shapes)
    found = _kernels(text)  # with what they are derived from around their names
    assert all(any(name in kernel for kernel in found) for name in expected), found
    assert "collective-permute" not in text
