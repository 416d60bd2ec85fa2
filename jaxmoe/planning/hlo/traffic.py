# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts what the kernels of a program compiled for a GPU move and compute, by kind of kernel.

Each instruction outside a fusion is one kernel. Its bytes are those of `ProgramWalk`, so a loop
counts as often as it turns; its kind is read from what it calls and from the words that XLA puts in
the names of its fusions:

    library products     dots, in fusions or alone, and calls of cuBLAS
    grouped products     our kernels with rows and the weights of experts, and with two sets of rows
                         whose result are such weights
    attention            our kernels and cuDNN's with queries, keys and values; backward if there is
                         a fourth array of that kind, the gradient of the output
    concatenations ...   fusions and single instructions, which move bytes at the rate of a copy

FLOPs are two for each product of two numbers. Grouped products count all rows that their arrays
hold, or the rows of a balanced batch where these are fewer: the kernels leave out places that stay
empty. Attention counts half of the pairs where queries and keys are equally many (causal, unless
cuDNN's call says otherwise), and the window of a call of cuDNN; windows of our own kernels and
documents in a row are not seen. The backward pass counts 2.5 times the forward pass, a third for
each gradient that a kernel returns.

To add a kind: `_WORDS`, or `_kernel` for one that computes, in `jaxmoe/planning/hlo/traffic.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Literal

from jaxmoe.planning.hlo.collectives import KINDS
from jaxmoe.planning.hlo.text import (
    Computation,
    Instruction,
    bytes_of,
    elements_of,
    operand_shapes,
    sizes_of,
)
from jaxmoe.planning.hlo.work import ProgramWalk, dot_flops

Limit = Literal[
    "copy",
    "product",
    "product_float32",
    "product_8bit",
    "grouped",
    "attention",
    "attention_backward",
    "link",
]
"""What bounds a kernel: a rate of `KernelRates`, or the links between devices."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelTraffic:
    """All kernels of one kind in one run of a program, on one device."""

    kind: str
    limit: Limit
    count: int
    """Executions."""
    bytes: float
    """Bytes read and written in device memory."""
    flops: float
    """Operations of products and attention; 0 for others."""


# The first row with a word of the name decides.
_WORDS = (
    ("concatenations", ("concatenate",)),
    ("gathers and scatters", ("gather", "scatter")),
    ("stacking", ("dynamic_update_slice", "dynamic-update-slice")),
    ("sums", ("reduce",)),
    ("selects", ("select",)),
    ("conversions", ("convert",)),
    ("copies", ("copy", "transpose", "slice", "pad")),
    ("zeros", ("broadcast",)),
    ("sorts", ("sort",)),
)
_OURS = ("mosaic_gpu", "triton")


def kernel_traffic(text: str, *, balanced_rows: float = math.inf) -> list[KernelTraffic]:
    """Return the kernels of a program by kind, most bytes first.

    Args:
        text: Text of an HLO module that was compiled for a GPU.
        balanced_rows: Rows that the experts of a device receive in a balanced batch.

    Raises:
        ValueError: The text has no entry computation.
    """
    walk = ProgramWalk(text)
    sums: dict[tuple[str, Limit], list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0])
    for instruction, computation, turns in walk.instructions(walk.module.entry, 1):
        moved = walk.bytes_moved(instruction, computation)
        moved -= _workspace(walk, instruction, computation)
        kind, limit, flops = _kernel(walk, instruction, computation, balanced_rows)
        if moved or flops:
            total = sums[kind, limit]
            total[0] += turns
            total[1] += turns * moved
            total[2] += turns * flops
    rows = [
        KernelTraffic(kind=kind, limit=limit, count=int(total[0]), bytes=total[1], flops=total[2])
        for (kind, limit), total in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def moved_outside(rows: list[KernelTraffic]) -> float:
    """Return the bytes that are moved outside kernels, products and collectives.

    Args:
        rows: Result of `kernel_traffic`.
    """
    return sum(row.bytes for row in rows if row.limit == "copy" and row.kind != "other kernels")


def _kernel(
    walk: ProgramWalk, instruction: Instruction, computation: Computation, balanced_rows: float
) -> tuple[str, Limit, float]:
    """Return the kind of an instruction, its limit, and its FLOPs."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        return "collectives", "link", 0.0
    parts = list(walk.parts(instruction, computation))
    for part, inner in parts:
        if part.opcode.startswith("custom-call"):
            return _call(part, inner, balanced_rows)
    products = [(part, inner) for part, inner in parts if part.opcode == "dot"]
    if products:
        largest, inner = max(products, key=lambda pair: dot_flops(*pair))
        flops = sum(dot_flops(*pair) for pair in products)
        return "library products", _limit_of_product(largest, inner), flops
    # An asynchronous fusion has no words in its name, but what it calls has.
    is_fusion = opcode == "fusion"
    for name in (instruction.name, instruction.attribute("calls")) if is_fusion else (opcode,):
        for kind, markers in _WORDS:
            if any(word in (name or "") for word in markers):
                return kind, "copy", 0.0
    return "elementwise", "copy", 0.0


def _call(
    call: Instruction, computation: Computation, balanced_rows: float
) -> tuple[str, Limit, float]:
    """Return the kind of a custom call, its limit, and its FLOPs."""
    target = re.search(r'custom_call_target="([^"]*)"', call.attributes)
    name = target[1] if target else ""
    shapes = [shape for shape in operand_shapes(call, computation) if not shape.startswith("(")]
    if name.startswith("__cublas"):
        flops = _cublas_flops(call, shapes)
        return "library products", _limit_of_product(call, computation), flops
    if name.startswith("__cudnn$fmha") or any(word in name for word in _OURS):
        heads = [sizes_of(shape) for shape in shapes if len(sizes_of(shape)) == 4]
        if len(heads) >= 3:
            return _attention(call, heads)
        flops = _grouped_flops(call, shapes, balanced_rows)
        return ("grouped products", "grouped", flops) if flops else ("other kernels", "copy", 0.0)
    if "sort" in name.lower():
        return "sorts", "copy", 0.0
    return "other kernels", "copy", 0.0


def _workspace(walk: ProgramWalk, instruction: Instruction, computation: Computation) -> int:
    """Return the bytes that a call of a library gets to work in, which need not be moved."""
    parts = walk.parts(instruction, computation)
    if not any('custom_call_target="__cu' in part.attributes for part, _ in parts):
        return 0
    results = elements_of(instruction.shape)
    return sum(bytes_of(shape) for shape in results[1:] if shape.startswith(("s8", "u8")))


def _limit_of_product(product: Instruction, computation: Computation) -> Limit:
    """Return the rate of a product by the bytes of its operands' values."""
    shape = operand_shapes(product, computation)[0]
    width = bytes_of(shape) / max(math.prod(sizes_of(shape)), 1)
    return "product_float32" if width >= 4 else "product" if width >= 2 else "product_8bit"


def _cublas_flops(call: Instruction, shapes: list[str]) -> float:
    """Return the FLOPs of a call of cuBLAS, whose result may stand beside a workspace."""
    match = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', call.attributes)
    sizes = sizes_of(shapes[0])
    dims = [int(dim) for dim in re.findall(r"\d+", match[1])] if match else [len(sizes) - 1]
    result = sizes_of(elements_of(call.shape)[0])
    return 2.0 * math.prod(result) * math.prod(sizes[dim] for dim in dims)


def _grouped_flops(call: Instruction, shapes: list[str], balanced_rows: float) -> float:
    """Return the FLOPs of rows times the weights of their groups, or of rows times rows by group;
    0 for another kernel."""
    sizes = [sizes_of(shape) for shape in shapes if not shape.startswith(("s32", "u32", "pred"))]
    rows = [size for size in sizes if len(size) == 2]
    weights = [size for size in sizes if len(size) == 3]
    results = [sizes_of(shape) for shape in elements_of(call.shape)]
    if not weights and len(rows) >= 2:
        weights = [size for size in results if len(size) == 3]
    if not rows:
        return 0.0
    return 2 * min(rows[0][0], balanced_rows) * sum(size[1] * size[2] for size in weights)


def _attention(call: Instruction, heads: list[list[int]]) -> tuple[str, Limit, float]:
    """Return the kind of a kernel of attention, its limit, and its FLOPs.

    Args:
        call: The kernel.
        heads: Sizes of its operands with heads: queries [B S N H], keys [B U M H], values, and in
            the backward pass the gradient of the output.
    """
    (batch, queries, num_heads, width), keys, values = heads[0], heads[1][1], heads[2]
    forward = 2.0 * batch * num_heads * _pairs(call, queries, keys) * (width + values[3])
    if len(heads) == 3:
        return "attention, forward", "attention", forward
    gradients = sum(len(sizes_of(shape)) == 4 for shape in elements_of(call.shape))
    return "attention, backward", "attention_backward", 2.5 * forward * gradients / 3


def _pairs(call: Instruction, queries: int, keys: int) -> float:
    """Return the visible pairs of one head."""
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', call.attributes)
    mask = re.search(r'"mask_type":\s*"(\w+)"', call.attributes)
    is_causal = "CAUSAL" in mask[1] if mask else queries == keys
    if window and 0 < (width := int(window[1])) < keys:
        return queries * width - width * width / 2
    return queries * keys / 2 if is_causal else float(queries * keys)
