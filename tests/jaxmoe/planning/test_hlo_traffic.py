# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels of a program for a GPU by kind: bytes, FLOPs, and the seconds that they predict.

`tests/golden/hlo/h100.txt` is a small program that XLA compiled for a described H100: a table's
rows are gathered and rounded, a loop multiplies them by three weights, and the sum of their squares
and the weights are written in one array. Its frames, metadata and most settings are cut out.
"""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from jaxmoe.planning.hardware import CHIPS, H100_RATES
from jaxmoe.planning.hlo import KernelTraffic, kernel_traffic, moved_outside, work
from jaxmoe.planning.kernel_time import collective_seconds, kernel_seconds
from jaxmoe.planning.mesh_axes import AxisBytes

RECORDED = pathlib.Path(__file__).parents[2] / "golden" / "hlo" / "h100.txt"


def test_kernels_of_a_recorded_program_by_hand():
    """Rows 1024 x 256, three weights of 256 x 256, a table of 512 x 256; the loop turns 3 times."""
    rows = {row.kind: row for row in kernel_traffic(RECORDED.read_text())}
    rows_bytes, weight, stacked = 2 * 1024 * 256, 256 * 256, 3 * 256 * 256
    # Rows and a weight in bfloat16 enter, rows leave; what cuBLAS gets to work in is not moved.
    products = rows["library products"]
    assert (products.count, products.limit) == (3, "product")
    assert products.flops == 3 * 2 * 1024 * 256 * 256
    assert products.bytes == 3 * (2 * rows_bytes + 2 * weight)
    # In the loop tanh of the rows, and one weight of the stack by its index; before it as many rows
    # of the table as it has, where more are asked for, by their ids.
    table = 4 * 512 * 256
    in_loop = 3 * (2 * rows_bytes + (4 + 2) * weight + 4)
    assert rows["conversions"].count == 7
    assert rows["conversions"].bytes == in_loop + table + 4 * 1024 + rows_bytes
    assert rows["concatenations"].bytes == 2 * (table + 4 * stacked) + 4
    assert rows["sums"].bytes == rows_bytes + 4 * 512 + 4 * 512 + 4
    outside = sum(row.bytes for kind, row in rows.items() if kind != "library products")
    assert moved_outside(list(rows.values())) == outside


def program(*lines: str, computations: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n\n{computations}\nENTRY %main () -> f32[8] {{\n{body}\n}}\n"


HEADS = tuple(f"%{name} = bf16[4,4096,16,128] parameter({at})" for at, name in enumerate("qkvd"))
FORWARD = 2 * 4 * 16 * 4096 * 4096 * 128  # half of the pairs, two products


@pytest.mark.parametrize(
    ("lines", "kind", "limit", "flops"),
    [
        pytest.param(
            (
                "%rows = bf16[1024,64] parameter(0)",
                "%experts = bf16[8,32,64] parameter(1)",
                "%tiles = s32[20,4] parameter(2)",
                "ROOT %y = bf16[1024,32] custom-call(%tiles, %rows, %experts),"
                ' custom_call_target="mosaic_gpu_v2"',
            ),
            "grouped products",
            "grouped",
            2 * 1024 * 32 * 64,
            id="rows times the weights of their experts",
        ),
        pytest.param(
            (
                "%ends = s32[9] parameter(0)",
                "%rows = bf16[1024,64] parameter(1)",
                "%others = bf16[1024,32] parameter(2)",
                "ROOT %y = bf16[8,64,32] custom-call(%ends, %rows, %others),"
                ' custom_call_target="mosaic_gpu_v2"',
            ),
            "grouped products",
            "grouped",
            2 * 1024 * 32 * 64,
            id="rows times rows, by expert",
        ),
        pytest.param(
            (
                *HEADS,
                "ROOT %y = (bf16[4,4096,16,128], f32[4,16,4096]) custom-call(%q, %k, %v),"
                ' custom_call_target="mosaic_gpu_v2"',
            ),
            "attention, forward",
            "attention",
            FORWARD,
            id="attention",
        ),
        pytest.param(
            (
                *HEADS,
                "%lse = f32[4,16,4096] parameter(4)",
                "ROOT %y = (bf16[4,16,4096,128], f32[4,16,4096], u8[0]) custom-call(%q, %k, %v),"
                ' custom_call_target="__cudnn$fmhaSoftmax",'
                ' backend_config={"mask_type": "NO_MASK", "sliding_window_length": 0}',
            ),
            "attention, forward",
            "attention",
            2 * FORWARD,
            id="attention of cuDNN without a mask",
        ),
        pytest.param(
            (
                *HEADS,
                "ROOT %y = (bf16[4,16,4096,128], f32[4,16,4096], u8[0]) custom-call(%q, %k, %v),"
                ' custom_call_target="__cudnn$fmhaSoftmax",'
                ' backend_config={"mask_type": "CAUSAL", "sliding_window_length": 1024}',
            ),
            "attention, forward",
            "attention",
            FORWARD * (1024 * 4096 - 1024**2 / 2) / (4096**2 / 2),
            id="attention of cuDNN in a window",
        ),
        pytest.param(
            (
                *HEADS,
                "ROOT %y = (f32[4,4096,16,128], f32[4,4096,16,128]) custom-call(%q, %k, %v, %d),"
                ' custom_call_target="mosaic_gpu_v2"',
            ),
            "attention, backward",
            "attention_backward",
            2.5 * FORWARD * 2 / 3,
            id="two of the three gradients",
        ),
        pytest.param(
            (
                "%x = f32[16,64] parameter(0)",
                "%w = f32[64,32] parameter(1)",
                "ROOT %y = f32[16,32] dot(%x, %w), lhs_contracting_dims={1},"
                " rhs_contracting_dims={0}",
            ),
            "library products",
            "product_float32",
            2 * 16 * 64 * 32,
            id="a product in float32",
        ),
        pytest.param(
            (
                "%x = f32[4096] parameter(0)",
                'ROOT %y = f32[4096] custom-call(%x), custom_call_target="mosaic_gpu_v2"',
            ),
            "other kernels",
            "copy",
            0.0,
            id="a kernel without products",
        ),
    ],
)
def test_a_kernel_is_known_by_what_it_takes(lines, kind, limit, flops):
    (row,) = kernel_traffic(program(*lines))
    assert (row.kind, row.limit, row.count, row.flops) == (kind, limit, 1, pytest.approx(flops))
    if kind != "other kernels":
        assert moved_outside([row]) == 0.0


def test_places_that_stay_empty_are_not_computed():
    lines = (
        "%rows = bf16[1024,64] parameter(0)",
        "%experts = bf16[8,32,64] parameter(1)",
        'ROOT %y = bf16[1024,32] custom-call(%rows, %experts), custom_call_target="mosaic_gpu_v2"',
    )
    (row,) = kernel_traffic(program(*lines), balanced_rows=256)
    assert row.flops == 2 * 256 * 32 * 64
    (row,) = kernel_traffic(program(*lines), balanced_rows=4096)
    assert row.flops == 2 * 1024 * 32 * 64


UPDATE = """
%fused_dynamic_update_slice (p0: f32[64,1024], p1: f32[1,1024], p2: s32[]) -> f32[64,1024] {
  %p0 = f32[64,1024] parameter(0)
  %p1 = f32[1,1024] parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %u = f32[64,1024] dynamic-update-slice(%p0, %p1, %p2, %p2)
}
"""


def test_an_asynchronous_fusion_counts_as_one_that_is_not():
    """It updates in place: a row is read and written, not the array."""
    operands = ("%x = f32[64,1024] parameter(0)", "%r = f32[1,1024] parameter(1)")
    index = "%i = s32[] parameter(2)"
    called = "calls=%fused_dynamic_update_slice"
    text = program(
        *operands,
        index,
        "%s = ((f32[64,1024], f32[1,1024], s32[]), f32[64,1024], u32[])"
        f" fusion-start(%x, %r, %i), {called}",
        "ROOT %fusion-done = f32[64,1024] fusion-done(%s)",
        computations=UPDATE,
    )
    at_once = program(
        *operands,
        index,
        f"ROOT %loop_dynamic_update_slice_fusion = f32[64,1024] fusion(%x, %r, %i), {called}",
        computations=UPDATE,
    )
    moved = 2 * 4 * 1024 + 4
    assert work(text).bytes_accessed == work(at_once).bytes_accessed == moved
    for found in (kernel_traffic(text), kernel_traffic(at_once)):
        assert [(row.kind, row.bytes) for row in found] == [("stacking", moved)]


def test_a_kernel_takes_the_longer_of_its_products_and_its_bytes():
    chip = CHIPS["h100"]
    row = KernelTraffic(
        kind="library products", limit="product", count=1, bytes=2.93e9, flops=0.7e12
    )
    assert kernel_seconds(row, chip) == pytest.approx(1e-3)
    assert kernel_seconds(dataclasses.replace(row, bytes=29.3e9), chip) == pytest.approx(1e-2)
    assert kernel_seconds(dataclasses.replace(row, flops=7e12), chip) == pytest.approx(1e-2)
    assert kernel_seconds(dataclasses.replace(row, limit="link"), chip) == 0.0
    # Forward and backward together are 3.5 times the forward pass at their common rate.
    forward, backward = 1 / H100_RATES.attention, 2.5 / H100_RATES.attention_backward
    assert 3.5 / (forward + backward) == pytest.approx(H100_RATES.attention_both)
    assert CHIPS["h100"].kernel_rates == H100_RATES
    assert CHIPS["h200"].kernel_rates.copy == pytest.approx(2.93e12 * 4.8 / 3.35)


def test_collectives_take_their_messages_and_bytes():
    sent = AxisBytes(kind="all-reduce", axes=("data",), count=2, result_bytes=4, wire_bytes=450e6)
    mesh = {"replica": 1, "data": 8, "expert": 1}
    seconds = collective_seconds([sent], mesh, CHIPS["h100"])
    assert seconds == pytest.approx(1e-3 + 2 * 7 * 5e-6)
