# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rules from logical axes to mesh axes: the whole layout of a model is one of these tables.

`resolve(("embed", "mlp"))` looks each name up and gives a PartitionSpec. Two dimensions of one
array may not land on the same mesh axis, and a dimension must divide by the devices it is spread
over; both are errors in words, before anything is compiled.

The layouts built from these rules are in `sharding/state_layouts.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from sharding import axes as ax
from sharding.fold import Refinement

Rule = tuple[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogicalAxisRules:
    """One row per logical axis: the mesh axes over which such a dimension is spread."""

    rules: tuple[Rule, ...]
    """(logical axis, mesh axes); no mesh axes: every device holds the whole dimension."""

    def __post_init__(self):
        names = [name for name, _ in self.rules]
        if missing := sorted(set(ax.LOGICAL_AXES) - set(names)):
            raise ValueError(f"rules say nothing of the logical axes {', '.join(missing)}")
        for name, mesh_axes in self.rules:
            for axis in mesh_axes:
                if ax.whole_axis(axis) not in ax.MESH_AXES:
                    raise ValueError(
                        f"rule {name}={mesh_axes}: {axis!r} is no mesh axis"
                        f" (there are {', '.join(ax.MESH_AXES)})"
                    )

    def mesh_axes(self, name: str | None) -> tuple[str, ...]:
        """Mesh axes of one logical axis; None is a dimension that is never spread.

        Raises:
            ValueError: unknown name.
        """
        if name is None:
            return ()
        table = dict(self.rules)
        if name not in table:
            near = difflib.get_close_matches(name, table, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name!r} is no logical axis{hint}")
        return table[name]

    def resolve(self, logical: Sequence[str | None]) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes.

        Raises:
            ValueError: unknown name, or one mesh axis used for two dimensions.
        """
        entries = [self.mesh_axes(name) for name in logical]
        seen: dict[str, str | None] = {}
        for name, mesh_axes in zip(logical, entries, strict=True):
            for axis in mesh_axes:
                if axis in seen:
                    raise ValueError(
                        f"logical axes {seen[axis]!r} and {name!r} of one array both lie on the"
                        f" mesh axis {axis!r}: give one of them another rule"
                    )
                seen[axis] = name
        return PartitionSpec(*(_entry(mesh_axes) for mesh_axes in entries))

    def check_divides(
        self,
        path: str,
        shape: Sequence[int],
        logical: Sequence[str | None],
        mesh_shape: Mapping[str, int],
        fields: Mapping[str, str] | None = None,
    ) -> None:
        """Refuses a dimension that does not divide by the devices it is spread over.

        Args:
            path: what to call the array in the error.
            shape: its shape.
            logical: its logical axes.
            mesh_shape: {mesh axis: size}.
            fields: {logical axis: the field of a config that says how large it is}.

        Raises:
            ValueError: naming the array, the dimension, both sizes and the way out.
        """
        for size, name in zip(shape, logical, strict=True):
            mesh_axes = self.mesh_axes(name)
            shards = math.prod(mesh_shape[axis] for axis in mesh_axes)
            if size % shards:
                cut = [axis for axis in mesh_axes if mesh_shape[axis] > 1]
                where = " x ".join(f"mesh.{axis}={mesh_shape[axis]}" for axis in cut)
                if any(axis != ax.whole_axis(axis) for axis in cut):
                    where += " (of the folded mesh)"
                way = f"choose a multiple of {shards}, another mesh, or"
                field = (fields or {}).get(name or "")
                if field and len(cut) == 1 and cut[0] in ax.MESH_AXES:
                    fitting = _or([n for n in range(1, shards) if size % n == 0])
                    way = (
                        f"set {field} to a multiple of {shards} or mesh.{cut[0]} to"
                        f" {fitting}, or choose"
                    )
                raise ValueError(
                    f"{path}: the dimension {name!r} of size {size} must be divisible by {where}:"
                    f" {way} rules that do not spread {name!r}"
                )

    def folded(self, refinement: Refinement) -> LogicalAxisRules:
        """The same layout on a mesh whose axes are cut, with the experts in theirs.

        Args:
            refinement: of `sharding.fold.refine`.
        """
        embed = self.mesh_axes(ax.EXPERT_EMBED)
        replicas = tuple(axis for axis in embed if axis == ax.REPLICA)
        experts = {
            ax.EXPERTS: refinement.expert,
            ax.EXPERT_MLP: refinement.expert_tensor,
            # What is spread at all is spread over the devices that have the same experts.
            ax.EXPERT_EMBED: refinement.expert_data + replicas if embed else (),
        }
        return LogicalAxisRules(
            rules=tuple(
                (name, experts[name])
                if name in experts
                else (name, tuple(piece for axis in axes for piece in refinement.names(axis)))
                for name, axes in self.rules
            )
        )

    def replace(self, **changes: tuple[str, ...]) -> LogicalAxisRules:
        """The same rules with some rows changed."""
        for name in changes:
            self.mesh_axes(name)
        return LogicalAxisRules(
            rules=tuple((name, changes.get(name, axes)) for name, axes in self.rules)
        )


def _or(numbers: Sequence[int]) -> str:
    """1, 2 or 4."""
    *some, last = map(str, numbers)
    return f"{', '.join(some)} or {last}" if some else last


def _entry(mesh_axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if not mesh_axes:
        return None
    return mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes


DATA_PARALLEL = LogicalAxisRules(
    rules=(
        (ax.LAYERS, ()),
        (ax.EMBED, ()),
        (ax.VOCAB, (ax.TENSOR,)),
        (ax.HEADS, (ax.TENSOR,)),
        (ax.KV_HEADS, (ax.TENSOR,)),
        (ax.HEAD_DIM, ()),
        (ax.MLP, (ax.TENSOR,)),
        (ax.GATE_UP, ()),
        (ax.EXPERTS, (ax.EXPERT,)),
        (ax.EXPERT_EMBED, ()),
        (ax.EXPERT_MLP, (ax.TENSOR,)),
        (ax.ROUTER_OUT, ()),
        (ax.ROUTER_DIM, ()),
        (ax.CONSTANTS, ()),
        (ax.ROUTER_SLOTS, ()),
        (ax.NORM, ()),
        (ax.ACT_BATCH, ax.BATCH_AXES),
        (ax.ACT_SEQ, (ax.SEQ, ax.TENSOR)),
        (ax.ACT_SEQ_INNER, (ax.SEQ,)),
        (ax.ACT_CACHE, (ax.SEQ,)),
        (ax.ACT_EMBED, ()),
        (ax.ACT_HEADS, (ax.TENSOR,)),
        (ax.ACT_KV_HEADS, (ax.TENSOR,)),
        (ax.ACT_MLP, (ax.TENSOR,)),
        (ax.ACT_VOCAB, (ax.TENSOR,)),
    )
)
"""Parameters whole on every device of the data axis; batch and heads spread."""

FULLY_SHARDED = DATA_PARALLEL.replace(
    embed=(ax.DATA, ax.EXPERT, ax.SEQ), expert_embed=(ax.DATA, ax.SEQ)
)
"""ZeRO-3: every matrix, its gradient and its optimiser state spread over all devices of a replica
that would otherwise hold copies."""
