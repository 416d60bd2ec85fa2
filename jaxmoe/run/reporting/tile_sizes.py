# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the widths of a model with the tiles in which matrix units multiply.

A product of m rows, k inputs and n outputs is computed in tiles of its output of 256 x 256, those
of experts of 128 x 256, over steps of 64 inputs; what does not fill a tile is computed as well:

    wasted = 1 - m k n / (up(m, 256 or 128) up(k, 64) up(n, 256))

So widths (D, F, V / tensor) should be multiples of 256, and an expert should get at least 128 rows.
The rules are those for the MI300X, after arXiv 2511.17127; they suit other GPUs and TPUs, whose
tiles are as large or smaller. The tile sizes are an assumption, not a measurement.
"""

from __future__ import annotations

import dataclasses
import math

from jaxmoe.parameters import ParameterSpec
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.sizes import Sizes
from sharding import axes as ax

TILE = 256
EXPERT_ROWS = 128
INPUT_STEP = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TiledProduct:
    """A matrix product of one device."""

    path: str
    """Path of the weight."""
    count: int
    """Number of such products in a forward pass."""
    rows: float
    """m: rows of a micro-batch; those of an even load for experts."""
    inputs: int
    """k"""
    outputs: int
    """n"""
    is_expert: bool
    """Whether the rows are those of one expert."""

    @property
    def flops(self) -> float:
        """Multiplications and additions of all such products."""
        return 2.0 * self.count * self.rows * self.inputs * self.outputs

    @property
    def executed_flops(self) -> float:
        """FLOPs with tiles filled up."""
        rows = _up(math.ceil(self.rows), EXPERT_ROWS if self.is_expert else TILE)
        inputs = _up(self.inputs, INPUT_STEP)
        outputs = _up(self.outputs, TILE)
        return 2.0 * self.count * rows * inputs * outputs

    @property
    def wasted_share(self) -> float:
        """Share of the executed FLOPs that are not needed."""
        return 1.0 - self.flops / self.executed_flops

    @property
    def advice(self) -> str:
        """What breaks a rule; empty if nothing does."""
        odd = dict.fromkeys(str(width) for width in (self.inputs, self.outputs) if width % TILE)
        hints = [f"{' and '.join(odd)} not a multiple of {TILE}"] if odd else []
        if self.is_expert and self.rows < EXPERT_ROWS:
            hints.append(f"below {EXPERT_ROWS} rows for an expert")
        return ", ".join(hints)


def products(plan: StepPlan) -> list[TiledProduct]:
    """Return the products of weights in the forward pass of a device.

    Args:
        plan: Step on a mesh of known sizes.
    """
    sizes = Sizes.of(plan)
    is_tied = plan.model.has_tied_embeddings
    return [
        _product(sizes, row)
        for row in plan.table
        if row.declaration.matrix is not None and (row.declaration.role != "embedding" or is_tied)
    ]


def _product(sizes: Sizes, row: ParameterSpec) -> TiledProduct:
    first, second = row.declaration.matrix or ((), ())
    if row.declaration.role == "embedding":  # tied: the head multiplies by its transpose
        first, second = second, first
    is_expert = ax.EXPERTS in row.declaration.axes
    inputs = _width(sizes, row, first)
    outputs = _width(sizes, row, second)
    count = sizes.layers(row)
    rows = sizes.inner_tokens
    if is_expert:
        dim = row.declaration.axes.index(ax.EXPERTS) - len(row.declaration.axes)
        width = _width(sizes, row, (dim,))
        stack = sizes.stack_of(row)
        assert stack is not None  # experts are in layers
        rows = sizes.rows(stack.kind.feed_forward.sizes) / width
        count = count * width
    return TiledProduct(
        path=row.path,
        count=count,
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        is_expert=is_expert,
    )


def _width(sizes: Sizes, row: ParameterSpec, dims: tuple[int, ...]) -> int:
    """Return the product of some dimensions of a weight on one device in use."""
    axes = set(sizes.kept_axes(row))
    width = 1
    for dim in dims:
        at = dim % len(row.shape)
        entry = row.spec[at] if at < len(row.spec) else None
        names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        width *= row.shape[at] // sizes.devices(axis for axis in names if axis in axes)
    return width


def _up(number: int, multiple: int) -> int:
    return max(1, -(-number // multiple)) * multiple


def sizes_rows(plan: StepPlan) -> list[tuple[str, ...]]:
    """Return the rows of a table: headings, every kind of product, the sum.

    Args:
        plan: Step on a mesh of known sizes.
    """
    product_list = products(plan)
    rows: list[tuple[str, ...]] = [("product", "number", "rows", "in", "out", "wasted")]
    rows += [
        (
            row.path,
            str(row.count),
            f"{row.rows:g}",
            str(row.inputs),
            str(row.outputs),
            f"{row.wasted_share:.1%}",
        )
        for row in product_list
    ]
    executed = sum(row.executed_flops for row in product_list)
    wasted = 1.0 - sum(row.flops for row in product_list) / executed
    count = sum(row.count for row in product_list)
    return [*rows, ("all", str(count), "", "", "", f"{wasted:.1%}")]


def broken_rules(plan: StepPlan) -> list[str]:
    """Return a line for every product that breaks a rule.

    Args:
        plan: Step on a mesh of known sizes.
    """
    return [f"{product.path}: {product.advice}" for product in products(plan) if product.advice]
