# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The only room that spells an output sharding, a reshard or a sharding constraint.

One model runs in three surroundings, told apart while tracing by the current abstract mesh:

  none      no mesh, or inside somebody's shard_map: arrays are local, nothing is said.
  auto      a user's mesh with Auto axes, whatever they are called: the compiler lays out, nothing
            is said.
  explicit  a mesh from `sharding.mesh.make_mesh`: shardings are part of the types, and the
            functions here state the ones that JAX cannot infer.

`Placement` carries the rules and offers the operations a layer needs. `island` runs a function on
local shards: routing, sorting, dispatch and kernels live there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array

from pallas_kernels.jax_versions import match_varying
from sharding.axes import ACT_BATCH, is_our_mesh
from sharding.rules import LogicalAxisRules

Surroundings = Literal["none", "auto", "explicit"]
LogicalAxes = tuple[str | None, ...]


def surroundings() -> Surroundings:
    """Which of the three cases the code being traced is in.

    Raises:
        ValueError: an Explicit mesh whose axes are not ours, or a mixture of Auto and Explicit.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = set(mesh.axis_types) if not mesh.empty else set()
    if not types or AxisType.Manual in types:
        return "none"
    if types == {AxisType.Auto}:
        return "auto"
    if types == {AxisType.Explicit} and is_our_mesh(mesh.axis_names):
        return "explicit"
    raise ValueError(
        f"the current mesh has axes {mesh.axis_names} of types"
        f" {tuple(t.name for t in mesh.axis_types)}: jaxmoe needs either a mesh from"
        " sharding.make_mesh(MeshConfig(...)), or one whose axes are all Auto"
    )


def without_mesh():
    """A context in which no mesh is current: for `jax.eval_shape` of whole models."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The operations whose result needs to be told where it lies."""

    rules: LogicalAxisRules

    def einsum(
        self, subscripts: str, x: Array, weight: Array, *, axes: LogicalAxes, dtype: Any = None
    ) -> Array:
        """`jnp.einsum` of activations and a weight, whose result has these logical axes.

        Args:
            subscripts: as for `jnp.einsum`; each letter stands in two of the three terms.
            x: activations.
            weight: of the same dtype.
            axes: logical axes of the result.
            dtype: dtype of the result and of the accumulation; that of the operands when None.
        """
        dtype = dtype or x.dtype
        if surroundings() != "explicit":
            return _local_einsum(subscripts, x, weight, dtype)
        spec = self.rules.resolve(axes)
        return jnp.einsum(subscripts, x, weight, preferred_element_type=dtype, out_sharding=spec)

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes over which a logical axis is spread here: none outside an Explicit mesh."""
        return self.rules.mesh_axes(name) if surroundings() == "explicit" else ()

    def place(self, x: Array, axes: LogicalAxes) -> Array:
        """The same array, laid out by these logical axes."""
        if surroundings() != "explicit":
            return x
        return jax.sharding.reshard(x, self.rules.resolve(axes))

    def island(
        self,
        function: Callable[..., Any],
        *,
        in_axes: Sequence[Any],
        out_axes: Any,
    ) -> Callable[..., Any]:
        """`function` on the local shards of its arguments, under `shard_map` on an Explicit mesh.

        Args:
            function: called as `function(*local_arguments, batch_axes=names)`; `names` are the
                mesh axes over which a sum over the batch needs a psum, and () where arrays are
                whole. An output without batch axis must have been summed over `names`.
            in_axes: per argument a tree of logical axes (tuples, as leaves) of the same structure;
                an absent argument is an empty dict, never None.
            out_axes: the same for the result.

        Returns:
            A function of the global arrays. Arguments are laid out by `in_axes` first: an axis
            named None is gathered, and the gradient is scattered back.
        """
        if surroundings() != "explicit":
            return lambda *arguments: function(*arguments, batch_axes=())

        names = self.rules.mesh_axes(ACT_BATCH)

        def spec(tree):
            return jax.tree.map(self.rules.resolve, tree, is_leaf=_is_axes)

        in_specs = tuple(spec(tree) for tree in in_axes)

        def run(*arguments):
            placed = jax.tree.map(
                lambda axes, x: jax.sharding.reshard(x, self.rules.resolve(axes)),
                tuple(in_axes),
                arguments,
                is_leaf=_is_axes,
            )
            body = jax.shard_map(
                lambda *local: function(*local, batch_axes=names),
                in_specs=in_specs,
                out_specs=spec(out_axes),
            )
            return body(*placed)

        return run


def move(x: Array, spec: PartitionSpec) -> Array:
    """`x`, laid out by a spec on any Explicit mesh, whatever its axes are called."""
    return jax.sharding.reshard(x, spec)


def place_like(x: Array, other: Array) -> Array:
    """`x`, laid out as another array of its shape; as it is outside an Explicit mesh."""
    if surroundings() != "explicit":
        return x
    return jax.sharding.reshard(x, jax.typeof(other).sharding.spec)


def gather_along(x: Array, axis: str) -> Array:
    """`x`, no longer cut along one mesh axis; as it is outside an Explicit mesh."""
    if surroundings() != "explicit":
        return x

    def left(entry: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = (entry,) if isinstance(entry, str) else entry or ()
        return tuple(name for name in names if name != axis) or None

    return jax.sharding.reshard(x, PartitionSpec(*map(left, jax.typeof(x).sharding.spec)))


def _local_einsum(subscripts: str, x: Array, weight: Array, dtype: Any) -> Array:
    """`jnp.einsum` of activations and a weight, whose gradients are products of the same kind.

    JAX would derive the weight's gradient with the result's first; XLA on the CPU then lays the
    latter out by columns, together with all that computes it. Here the activations come first.
    """
    left, result = subscripts.split("->")
    first, second = left.split(",")

    def product(subscripts: str, one: Array, other: Array, dtype: Any) -> Array:
        wide = one.dtype if one.dtype == other.dtype else jnp.float32
        one, other = one.astype(wide), other.astype(wide)
        return jnp.einsum(subscripts, one, other, preferred_element_type=dtype)

    @jax.custom_vjp
    def project(x: Array, weight: Array) -> Array:
        return product(subscripts, x, weight, dtype)

    def backward(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
        x, weight = operands
        d_x = product(f"{result},{second}->{first}", gradient, weight, x.dtype)
        return d_x, product(f"{first},{result}->{second}", x, gradient, weight.dtype)

    project.defvjp(lambda x, weight: (project(x, weight), (x, weight)), backward)
    return project(match_varying(x, weight), match_varying(weight, x))


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(name, str | None) for name in node)
