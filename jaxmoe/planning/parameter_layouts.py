# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layouts of every parameter during a training step, and the collectives between them.

    stored     between steps                                rules of the parameters
    used       in a layer                                   split over tensor, expert, stage only
    gradient   of a layer, before it is reduced             P wherever it is not split in use
    updated    gradient, parameter and optimiser state      rules of the optimiser state
               during the update

S(i), B and P are those of `sharding/sbp.py`. Bytes are in the dtype of the stored parameters, for
one micro-batch; a plan with accumulation, recomputation and wire dtypes is
`jaxmoe/planning/traffic.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxmoe.execution import ExecutionConfig
from jaxmoe.parameters import ParameterSpec, ParameterTable
from sharding import axes as ax
from sharding.sbp import ArrayLayout, LayoutChange, changes

LEGEND = (
    "layouts on each mesh axis: S(i) split along dimension i, B the same on every device, P terms\n"
    "of a sum (arXiv 2110.15032); stored: between steps; used: in forward and backward passes;\n"
    "grad: gradient; updated: in the optimiser"
)
_HEADINGS = ("parameter", "axis", "stored", "used", "grad", "updated", "MB sent by a device")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterLayouts:
    """Layouts of one parameter during a step."""

    path: str
    stored: ArrayLayout
    """Layout between steps."""
    used: ArrayLayout
    """Layout in a layer."""
    gradient: ArrayLayout
    """Layout of its gradient before it is reduced."""
    updated: ArrayLayout
    """Layout during the update."""
    sent: tuple[tuple[LayoutChange, int], ...]
    """Changes in which something is sent, and how often in a step."""


def parameter_layouts(
    table: ParameterTable, execution: ExecutionConfig, mesh: Mapping[str, int], itemsize: int
) -> list[ParameterLayouts]:
    """Return the layouts of every parameter.

    Args:
        table: Parameter table of the model.
        execution: Layout rules and dispatcher.
        mesh: Devices along each axis of the mesh, pieces of a folded one included.
        itemsize: Bytes of a stored value.
    """
    has_head = any(row.declaration.role == "head" for row in table)
    routed = {_stack_of(row.path) for row in table if ax.EXPERTS in row.declaration.axes}
    layouts = []
    for row in table:
        # The gradient of a look-up does not read the table; layers that are not recomputed keep
        # what they gathered.
        remat = execution.remat_of(_stack_of(row.path) in routed)
        is_kept = row.declaration.is_stacked and remat == "none"
        is_read_once = is_kept or (row.declaration.role == "embedding" and has_head)
        uses = 1 if is_read_once else 2
        layouts.append(_layouts(row, execution, mesh, row.size * itemsize, uses))
    return layouts


def _stack_of(path: str) -> str:
    """Return the path of the layers that a parameter belongs to: `layers`, or `layers/0`."""
    first, *remaining = path.split("/")
    return f"{first}/{remaining[0]}" if remaining and remaining[0].isdigit() else first


def _layouts(
    row: ParameterSpec, execution: ExecutionConfig, mesh: Mapping[str, int], size: int, uses: int
) -> ParameterLayouts:
    layout = execution.state_layout
    axes = row.declaration.axes
    stored = ArrayLayout.of_spec(layout.parameters.resolve(axes))
    updated = ArrayLayout.of_spec(layout.optimizer.resolve(axes))
    copy = ArrayLayout.of_spec((layout.copies or layout.parameters).resolve(axes))
    stored_axes = kept_axes(row, execution, mesh)
    splits = tuple(tuple(axis for axis in split if axis in stored_axes) for split in stored.splits)
    compute_layout = ArrayLayout(splits)
    # Every stage computes the layers alike that are not split over stages.
    alike = (ax.STAGE,) if row.declaration.is_stacked else ()
    replicated_axes = tuple(
        a for a, n in mesh.items() if n > 1 and a not in compute_layout.split_axes() + alike
    )
    gradient = ArrayLayout(splits, partial=replicated_axes)
    sent = [(change, 1) for change in changes(stored, copy, mesh, size)]
    for change in changes(copy, compute_layout, mesh, size):
        is_once = layout.gathered == "replica" and change.axis == ax.REPLICA
        sent.append((change, 1 if is_once else uses))
    if not row.is_frozen:
        sent += [(change, 1) for change in changes(gradient, updated, mesh, size)]
        sent += [(change, 1) for change in changes(updated, stored, mesh, size)]
    return ParameterLayouts(
        path=row.path,
        stored=stored,
        used=compute_layout,
        gradient=gradient,
        updated=updated,
        sent=tuple((change, times) for change, times in sent if change.collective),
    )


def kept_axes(
    row: ParameterSpec, execution: ExecutionConfig, mesh: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the mesh axes over which a parameter may stay split while it is used.

    Args:
        row: The parameter.
        execution: Layout rules and dispatcher.
        mesh: Devices along each axis of the mesh.
    """
    if ax.EXPERTS not in row.declaration.axes:
        return (ax.STAGE, *ax.pieces(tuple(mesh), (ax.TENSOR,)))
    if not execution.dispatcher.traits.spreads_experts:
        return (ax.STAGE,)
    rules = execution.axis_rules
    return (ax.STAGE, *rules.mesh_axes(ax.EXPERTS), *rules.mesh_axes(ax.EXPERT_MLP))


def layouts_text(
    table: ParameterTable, execution: ExecutionConfig, mesh: Mapping[str, int], itemsize: int
) -> str:
    """Return a table with a row for each parameter and mesh axis; see `parameter_layouts`."""
    wide = [axis for axis, size in mesh.items() if size > 1]
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for one in parameter_layouts(table, execution, mesh, itemsize):
        for number, axis in enumerate(wide):
            states = (one.stored, one.used, one.gradient, one.updated)
            rows.append(
                (
                    "" if number else one.path,
                    f"{axis}={mesh[axis]}",
                    *(str(layout.state(axis)) for layout in states),
                    ", ".join(
                        f"{change.collective}{f' x{times}' if times > 1 else ''}"
                        f" {times * change.bytes / 1e6:.3g}"
                        for change, times in one.sent
                        if change.axis == axis
                    ),
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join((LEGEND, "", *lines))
