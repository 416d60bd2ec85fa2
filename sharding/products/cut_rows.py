# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads rows of two tables that are cut by rows over devices, and sums them.

    y = sum_k s_k (u[i_k] . x) v[i_k]

Tokens travel along the mesh axes that cut the rows and the tokens, each device adds the rows that
it has, and the partial sums travel back. Rows never travel.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding import axes as ax
from sharding.constrain import Placement


@dataclasses.dataclass(frozen=True, slots=True)
class CutRows:
    """How tokens of the residual stream reach the rows of a table."""

    axes: tuple[str, ...]
    """Mesh axes that cut the rows."""
    dims: tuple[int | None, ...]
    """For each the dimension of [B S] that it cuts too, along which tokens travel; or None."""

    @classmethod
    def of(cls, placement: Placement, rows: str) -> CutRows:
        """Return the way to rows with this logical axis; called outside of regions.

        Args:
            placement: Layout rules.
            rows: Logical axis of the rows.
        """
        axes = placement.mesh_axes(rows)
        cut = (placement.mesh_axes(ax.ACT_BATCH), placement.mesh_axes(ax.ACT_SEQ))
        dims = (
            next((dim for dim, dim_axes in enumerate(cut) if axis in dim_axes), None)
            for axis in axes
        )
        return cls(axes, tuple(dims))

    def read(
        self,
        x: Float[Array, "B S F"],
        ids: Int[Array, "B S K"],
        scores: Float[Array, "B S K"],
        inputs: Float[Array, "R F"],
        values: Float[Array, "R Fv"],
    ) -> Float[Array, "B S Fv"]:
        """Return the weighted sum of rows for the tokens of this device, inside a region.

        Args:
            x: What each read row of `inputs` is multiplied with.
            ids: Rows to read, numbered over all devices.
            scores: Weight of each.
            inputs: Rows u of this device.
            values: Rows v of this device.
        """
        moved = [
            (axis, dim) for axis, dim in zip(self.axes, self.dims, strict=True) if dim is not None
        ]
        for axis, dim in moved:
            x, ids, scores = (
                jax.lax.all_gather(part, axis, axis=dim, tiled=True) for part in (x, ids, scores)
            )
        if self.axes:
            count = inputs.shape[0]
            ids = ids - jax.lax.axis_index(self.axes).astype(ids.dtype) * ids.dtype.type(count)
            scores = jnp.where((ids >= 0) & (ids < count), scores, 0)
        wide = jnp.float32
        read = inputs.at[ids].get(mode="clip")
        weights = scores * jnp.einsum("bskf,bsf->bsk", read, x, preferred_element_type=wide)
        read = values.at[ids].get(mode="clip")
        out = jnp.einsum(
            "bsk,bskf->bsf", weights.astype(x.dtype), read, preferred_element_type=wide
        ).astype(x.dtype)
        for axis, dim in reversed(moved):
            out = jax.lax.psum_scatter(out, axis, scatter_dimension=dim, tiled=True)
        still = tuple(axis for axis, dim in zip(self.axes, self.dims, strict=True) if dim is None)
        return jax.lax.psum(out, still) if still else out
