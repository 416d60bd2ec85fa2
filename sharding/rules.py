# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Maps logical axes to mesh axes; one such table lays out a whole model.

`resolve(("embed", "mlp"))` looks each name up and returns a PartitionSpec. Two dimensions of one
array must not use the same mesh axis, and a dimension must be divisible by the devices that split
it; both are checked before anything is compiled.

The layouts built from these rules are in `sharding/state_layouts.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from sharding import axes as ax
from sharding.fold import Refinement

Rule = tuple[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogicalAxisRules:
    """Mesh axes that split the dimensions with each logical axis."""

    rules: tuple[Rule, ...]
    """Pairs (logical axis, mesh axes); no mesh axes: every device holds the whole dimension."""

    def __post_init__(self):
        names = [name for name, _ in self.rules]
        if missing := sorted(set(ax.LOGICAL_AXES) - set(names)):
            raise ValueError(f"rules lack the logical axes {', '.join(missing)}")
        for name, mesh_axes in self.rules:
            for axis in mesh_axes:
                if ax.whole_axis(axis) not in ax.MESH_AXES:
                    raise ValueError(
                        f"rule {name}={mesh_axes}: {axis!r} is no mesh axis"
                        f" (there are {', '.join(ax.MESH_AXES)})"
                    )

    def mesh_axes(self, name: str | None) -> tuple[str, ...]:
        """Return the mesh axes of one logical axis; None is a dimension that is never split.

        Raises:
            ValueError: The name is unknown.
        """
        if name is None:
            return ()
        if name not in self._axes_by_name:
            near = difflib.get_close_matches(name, self._axes_by_name, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name!r} is no logical axis{hint}")
        return self._axes_by_name[name]

    @functools.cached_property
    def _axes_by_name(self) -> dict[str, tuple[str, ...]]:
        return dict(self.rules)

    def resolve(self, logical: Sequence[str | None]) -> PartitionSpec:
        """Return the PartitionSpec of an array with these logical axes.

        Raises:
            ValueError: A name is unknown, or two dimensions use one mesh axis.
        """
        names = tuple(logical)
        if names not in self._specs:
            self._specs[names] = self._resolve(names)
        return self._specs[names]

    @functools.cached_property
    def _specs(self) -> dict[tuple[str | None, ...], PartitionSpec]:
        """{logical axes: spec}; filled as they are asked for."""
        return {}

    def _resolve(self, logical: tuple[str | None, ...]) -> PartitionSpec:
        entries = [self.mesh_axes(name) for name in logical]
        seen: dict[str, str | None] = {}
        for name, mesh_axes in zip(logical, entries, strict=True):
            for axis in mesh_axes:
                if axis in seen:
                    raise ValueError(
                        f"logical axes {seen[axis]!r} and {name!r} of one array both use the"
                        f" mesh axis {axis!r}: give one of them another rule"
                    )
                seen[axis] = name
        return PartitionSpec(*(spec_entry(mesh_axes) for mesh_axes in entries))

    def check_divides(
        self,
        path: str,
        shape: Sequence[int],
        logical: Sequence[str | None],
        mesh_shape: Mapping[str, int],
        fields: Mapping[str, str] | None = None,
    ) -> None:
        """Check that every dimension is divisible by the devices that split it.

        Args:
            path: Name of the array in the error.
            shape: Shape of the array.
            logical: Logical axes of the array.
            mesh_shape: {mesh axis: size}.
            fields: {logical axis: the config field that sets its size}.

        Raises:
            ValueError: A dimension is not divisible; the message names the array, the dimension,
                both sizes and the way out.
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

    def on_fold(self, refinement: Refinement) -> LogicalAxisRules:
        """Return the same layout on a folded mesh, with the experts on their own axes.

        Args:
            refinement: Result of `sharding.fold.refine`.
        """
        embed = self.mesh_axes(ax.EXPERT_EMBED)
        replicas = tuple(axis for axis in embed if axis == ax.REPLICA)
        experts = {
            ax.EXPERTS: refinement.expert,
            ax.EXPERT_MLP: refinement.expert_tensor,
            # If it is split at all, it is split over the devices that have the same experts.
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

    def on_stages(self) -> LogicalAxisRules:
        """Return the same layout with layers and vocabulary split over pipeline stages."""
        vocab = self.mesh_axes(ax.VOCAB)
        predicted = self.mesh_axes(ax.ACT_VOCAB)
        return self.replace(
            layers=(ax.STAGE,), vocab=(ax.STAGE, *vocab), act_vocab=(ax.STAGE, *predicted)
        )

    def replace(self, **changes: tuple[str, ...]) -> LogicalAxisRules:
        """Return the same rules with some rows changed."""
        for name in changes:
            self.mesh_axes(name)
        return LogicalAxisRules(
            rules=tuple((name, changes.get(name, axes)) for name, axes in self.rules)
        )


def _or(numbers: Sequence[int]) -> str:
    """Return the numbers as a list in words: 1, 2 or 4."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def spec_entry(mesh_axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Return these mesh axes as the entry of a PartitionSpec for one dimension."""
    if not mesh_axes:
        return None
    return mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes


DATA_PARALLEL = LogicalAxisRules(
    rules=(
        (ax.LAYERS, ()),
        (ax.OTHER_LAYERS, ()),
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
        (ax.HEAD_EXPERTS, ()),
        (ax.ROUTER_SLOTS, ()),
        (ax.MEMORY_ROWS, (ax.EXPERT, ax.TENSOR)),
        (ax.MEMORY_DIM, ()),
        (ax.MEMORY_INNER, ()),
        (ax.NORM, ()),
        (ax.TAPS, ()),
        (ax.STATE_GROUPS, ()),
        (ax.STATE, ()),
        (ax.RANK, ()),
        (ax.STREAMS, ()),
        (ax.CONNECTIONS, ()),
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
"""Parameters whole on every device of the data axis; batch and heads split."""

FULLY_SHARDED = DATA_PARALLEL.replace(
    embed=(ax.DATA, ax.EXPERT, ax.SEQ),
    expert_embed=(ax.DATA, ax.SEQ),
    memory_dim=(ax.DATA, ax.SEQ),
)
"""ZeRO-3: every matrix, its gradient and its optimiser state split over all devices of a replica
that would otherwise hold copies."""
