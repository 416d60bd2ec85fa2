# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""States output shardings and reshards; the only file that spells them.

One model runs in three surroundings, distinguished while tracing by the current abstract mesh:

  none      no mesh, or inside a user's shard_map: arrays are local, no sharding is stated.
  auto      a user's mesh with Auto axes of any name: the compiler lays out, no sharding is stated.
  explicit  a mesh from `sharding.mesh.make_mesh`: shardings are part of the types, and the
            functions here state the ones that JAX cannot infer. In a region
            (`sharding/regions.py`) one axis is Manual and the others are Explicit: arrays are
            local in that axis, and no sharding names it.

`Placement` carries the rules and offers the operations a layer needs. `Placement.region` runs a
function on local shards: routing, sorting, dispatch and kernels run there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array

from pallas_kernels.jax_versions import match_varying, vary_over
from sharding.axes import ACT_BATCH, ACTIVATION_AXES, is_our_mesh
from sharding.rules import LogicalAxisRules, spec_entry

Surroundings = Literal["none", "auto", "explicit"]
LogicalAxes = tuple[str | None, ...]
MeshAxes = tuple[tuple[str, ...], ...]
"""Mesh axes for each dimension of an array."""


def surroundings() -> Surroundings:
    """Return which of the three cases the code being traced is in.

    Raises:
        ValueError: An Explicit mesh with other axes than MESH_AXES, or Auto and Explicit axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = set(mesh.axis_types) if not mesh.empty else set()
    if types == {AxisType.Auto}:
        return "auto"
    is_explicit = AxisType.Explicit in types and AxisType.Auto not in types
    if is_explicit and is_our_mesh(mesh.axis_names):
        return "explicit"
    if not types or AxisType.Manual in types:
        return "none"
    raise ValueError(
        f"the current mesh has axes {mesh.axis_names} of types"
        f" {tuple(t.name for t in mesh.axis_types)}: jaxmoe needs either a mesh from"
        " sharding.make_mesh(MeshConfig(...)), or one whose axes are all Auto"
    )


def manual_axes() -> tuple[str, ...]:
    """Return the axes of the current mesh in which arrays are local."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Manual
    )


def without_mesh():
    """Return a context without a current mesh, for `jax.eval_shape` of whole models."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """Logical axes of a weight that is encoded as it enters a region, and gathered encoded."""

    axes: LogicalAxes
    """Logical axes where it is used."""
    encode: Callable[[Array, MeshAxes, MeshAxes], Any]
    """(piece of a device; per dimension the mesh axes along which to gather it; per dimension the
    mesh axes that split it) -> the whole weight, encoded."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """How an argument enters a region, and what is gathered inside."""

    spec: PartitionSpec
    gathered: MeshAxes
    """Mesh axes per dimension along which it is gathered inside; empty: none."""
    encode: Callable[[Array, MeshAxes, MeshAxes], Any] | None = None
    """See `Encoded`."""

    def gather(self, x: Array, varying: tuple[str, ...]) -> Any:
        """Return the argument as the region reads it.

        Args:
            x: Local shard.
            varying: Mesh axes over which the other operands vary. They are stated before the
                gather, so that the gradient's sum over them is taken of a piece.
        """
        if self.encode is not None:
            cut = tuple(_axes_of(entry) for entry in self.spec)
            return self.encode(vary_over(x, varying), self.gathered, cut)
        if not self.gathered:
            return x
        x = vary_over(x, varying)
        for dimension, names in enumerate(self.gathered):
            if names:
                x = jax.lax.all_gather(x, names, axis=dimension, tiled=True)
        return x


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Operations whose result needs a stated layout."""

    rules: LogicalAxisRules
    """Mesh axes of each logical axis."""

    def einsum(
        self, subscripts: str, x: Array, weight: Array, *, axes: LogicalAxes, dtype: Any = None
    ) -> Array:
        """Return `jnp.einsum` of activations and a weight, with these logical axes.

        Args:
            subscripts: Subscripts of `jnp.einsum`; each letter is in two of the three terms.
            x: Activations.
            weight: Weight in the same dtype.
            axes: Logical axes of the result.
            dtype: Dtype of the result and of the accumulation; None: that of the operands.
        """
        dtype = dtype or x.dtype
        if surroundings() != "explicit":
            return _local_einsum(subscripts, x, weight, dtype)
        spec = self.spec(axes)
        if _is_narrow(x, weight, dtype):
            return _widened_einsum(subscripts, x, weight, dtype, spec)
        return jnp.einsum(subscripts, x, weight, preferred_element_type=dtype, out_sharding=spec)

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that split a logical axis; none outside an Explicit mesh."""
        return self._free(self.rules.mesh_axes(name)) if surroundings() == "explicit" else ()

    def spec(self, axes: LogicalAxes) -> PartitionSpec:
        """Return the spec of these logical axes, without mesh axes that are Manual here."""
        entries = map(_axes_of, self.rules.resolve(axes))
        return PartitionSpec(*(spec_entry(self._free(names)) for names in entries))

    @staticmethod
    def _free(names: tuple[str, ...]) -> tuple[str, ...]:
        manual = manual_axes()
        return tuple(name for name in names if name not in manual)

    def place(self, x: Array, axes: LogicalAxes) -> Array:
        """Return the array laid out by these logical axes."""
        if surroundings() != "explicit":
            return x
        return jax.sharding.reshard(x, self.spec(axes))

    def region(
        self,
        function: Callable[..., Any],
        *,
        in_axes: Sequence[Any],
        out_axes: Any,
    ) -> Callable[..., Any]:
        """Return `function` on local shards of its arguments, under `shard_map` on Explicit axes.

        Args:
            function: Called as `function(*local_arguments, batch_axes=names)`; `names` are the
                mesh axes over which a sum over the batch needs a psum, and () where arrays are
                whole. An output without batch axis must have been summed over `names`.
            in_axes: For each argument a tree of logical axes (tuples, as leaves) of the same
                structure; None for an absent argument, which is None. A weight may have `Encoded`
                axes.
            out_axes: The same for the result.

        Returns:
            A function of the global arrays. Arguments are laid out by `in_axes` first: an axis
            named None is gathered, and the gradient is scattered back. A weight (an argument
            without a logical axis of activations) that is split further, along axes that split
            activations, enters split and is gathered inside: its gradient is reduced and scattered
            over these axes, and only the remaining piece is summed over the others.
        """
        if surroundings() != "explicit":

            def run_here(*arguments):
                encoded = jax.tree.map(_encode_whole, tuple(in_axes), arguments, is_leaf=_is_axes)
                return function(*encoded, batch_axes=())

            return run_here

        names = self.mesh_axes(ACT_BATCH)

        def run(*arguments):
            spread = _names_in(
                self.spec(axes)
                for axes in jax.tree.leaves(tuple(in_axes), is_leaf=_is_axes)
                if not isinstance(axes, Encoded) and any(n in ACTIVATION_AXES for n in axes)
            )
            entries = jax.tree.map(
                lambda axes, x: self._entry(axes, x, spread),
                tuple(in_axes),
                arguments,
                is_leaf=_is_axes,
            )
            specs = jax.tree.map(lambda entry: entry.spec, entries, is_leaf=_is_entry)
            placed = jax.tree.map(
                lambda entry, x: jax.sharding.reshard(x, entry.spec),
                entries,
                arguments,
                is_leaf=_is_entry,
            )

            def body(*local):
                encoded = jax.tree.map(
                    lambda entry, x: entry.gather(x, spread), entries, local, is_leaf=_is_entry
                )
                return function(*encoded, batch_axes=names)

            out_specs = jax.tree.map(self.spec, out_axes, is_leaf=_is_axes)
            return jax.shard_map(body, in_specs=specs, out_specs=out_specs)(*placed)

        return run

    def _entry(self, axes: LogicalAxes | Encoded, x: Array, spread: tuple[str, ...]) -> _Entry:
        """Return how an argument with these logical axes enters a region.

        Args:
            axes: Logical axes where it is used.
            x: Global array.
            spread: Mesh axes that split the activations of the region.
        """
        if isinstance(axes, Encoded):
            return dataclasses.replace(self._entry(axes.axes, x, spread), encode=axes.encode)
        spec = self.spec(axes)
        stored = jax.typeof(x).sharding.spec
        if any(name in ACTIVATION_AXES for name in axes) or len(stored) != len(spec):
            return _Entry(spec, ())
        cuts = [(_axes_of(now), _axes_of(then)) for now, then in zip(stored, spec, strict=True)]
        if any(now[: len(then)] != then for now, then in cuts):
            return _Entry(spec, ())
        inner_axes = tuple(
            tuple(itertools.takewhile(lambda axis: axis in spread, now[len(then) :]))
            for now, then in cuts
        )
        if not any(inner_axes):
            return _Entry(spec, ())
        entries = (then + more for (_, then), more in zip(cuts, inner_axes, strict=True))
        return _Entry(PartitionSpec(*(axes or None for axes in entries)), inner_axes)


def place_like(x: Array, reference: Array) -> Array:
    """Return `x` laid out as another array of its shape; unchanged outside an Explicit mesh."""
    if surroundings() != "explicit":
        return x
    return jax.sharding.reshard(x, jax.typeof(reference).sharding.spec)


def place_at(x: Array, spec: PartitionSpec) -> Array:
    """Return `x` laid out by a spec; unchanged outside an Explicit mesh."""
    return jax.sharding.reshard(x, spec) if surroundings() == "explicit" else x


def gather_along(x: Array, axis: str) -> Array:
    """Return `x` gathered along one mesh axis; unchanged outside an Explicit mesh."""
    if surroundings() != "explicit":
        return x

    def left(entry: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        return tuple(name for name in _axes_of(entry) if name != axis) or None

    return jax.sharding.reshard(x, PartitionSpec(*map(left, jax.typeof(x).sharding.spec)))


def lie_at(
    function: Callable[..., Any], *, axes: tuple[str, ...], specs: Any
) -> Callable[..., Any]:
    """Return `function` under Auto axes, with results that lie as these specs say.

    Args:
        function: Function of arrays.
        axes: Explicit axes that are Auto while it is traced.
        specs: Specs of its results.
    """
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=specs)


def in_own_mesh(
    function: Callable[..., tuple[Array, Any]], reference: Array
) -> Callable[..., tuple[Array, Any]]:
    """Return `function` with the Explicit axes of a user's mesh as Auto axes while it is traced.

    Args:
        function: Function of arrays, of an array of the shape of `reference` and a tree of arrays.
        reference: Array as which the first result lies; the others are whole on every device.

    Returns:
        The function itself without a mesh, on Auto axes, and on a mesh of `sharding.make_mesh`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in types if kind == AxisType.Explicit)
    if not axes or is_our_mesh(mesh.axis_names):
        return function
    spec = jax.typeof(reference).sharding.spec
    return lie_at(function, axes=axes, specs=(spec, PartitionSpec()))


def reshape_to(x: Array, shape: tuple[int, ...], spec: PartitionSpec) -> Array:
    """Return an array in another shape and layout; the compiler chooses the collectives."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return lie_at(lambda x: x.reshape(shape), axes=names, specs=spec)(x)


def zeros_of(shape: jax.ShapeDtypeStruct, *leading: int) -> Array:
    """Return zeros laid out as an array of this shape, with further dimensions in front.

    Args:
        shape: Shape, dtype and, on an Explicit mesh, layout, from `jax.eval_shape`.
        *leading: Sizes of the dimensions in front, which are not split.
    """
    if surroundings() != "explicit":
        return jnp.zeros((*leading, *shape.shape), shape.dtype)
    spec = PartitionSpec(*(None,) * len(leading), *jax.typeof(shape).sharding.spec)
    return jnp.zeros((*leading, *shape.shape), shape.dtype, out_sharding=spec)


def _local_einsum(subscripts: str, x: Array, weight: Array, dtype: Any) -> Array:
    """Return `jnp.einsum` of activations and a weight, with the weight's gradient in fixed order.

    Where the result is wider than its factors, its gradient is rounded to their dtype, so that all
    three products are of narrow factors.

    JAX derives the weight's gradient with the result's gradient as the first operand; XLA on the
    CPU then lays that out by columns, together with all that computes it. Here the activations come
    first.
    """
    left, result = subscripts.split("->")
    first, second = left.split(",")

    def product(subscripts: str, lhs: Array, y: Array, dtype: Any) -> Array:
        wide = lhs.dtype if lhs.dtype == y.dtype else jnp.float32
        lhs = lhs.astype(wide)
        y = y.astype(wide)
        return jnp.einsum(subscripts, lhs, y, preferred_element_type=dtype)

    def multiply(x: Array, weight: Array) -> Array:
        return product(subscripts, x, weight, dtype)

    def backward(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
        x, weight = operands
        if _is_narrow(x, weight, dtype):
            gradient = gradient.astype(x.dtype)
        d_x = product(f"{result},{second}->{first}", gradient, weight, x.dtype)
        return d_x, product(f"{first},{result}->{second}", x, gradient, weight.dtype)

    project = jax.custom_vjp(multiply)
    # Not `project` again: a remat policy would not see the product in it, and keep nothing.
    project.defvjp(lambda x, weight: (multiply(x, weight), (x, weight)), backward)
    return project(match_varying(x, weight), match_varying(weight, x))


def _is_narrow(x: Array, weight: Array, dtype: Any) -> bool:
    """Return whether both factors are of one dtype that is narrower than the result's."""
    return x.dtype == weight.dtype and jnp.dtype(dtype).itemsize > x.dtype.itemsize


def _widened_einsum(
    subscripts: str, x: Array, weight: Array, dtype: Any, spec: PartitionSpec
) -> Array:
    """Return `jnp.einsum` in a wider dtype, whose gradient is rounded to that of the factors."""
    einsum = partial(jnp.einsum, subscripts, out_sharding=spec)

    def multiply(x: Array, weight: Array) -> Array:
        return einsum(x, weight, preferred_element_type=dtype)

    def backward(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
        _, pull = jax.vjp(einsum, *operands)
        return pull(gradient.astype(operands[0].dtype))

    project = jax.custom_vjp(multiply)
    project.defvjp(lambda x, weight: (multiply(x, weight), (x, weight)), backward)
    return project(x, weight)


def _encode_whole(axes: LogicalAxes | Encoded, x: Any) -> Any:
    """Return an argument of a region where nothing is sharded."""
    return axes.encode(x, (), ()) if isinstance(axes, Encoded) else x


def _axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _names_in(specs: Iterable[PartitionSpec]) -> tuple[str, ...]:
    """Return the mesh axes in these specs, without repeats."""
    return tuple({name: None for spec in specs for entry in spec for name in _axes_of(entry)})


def _is_entry(node: Any) -> bool:
    return isinstance(node, _Entry)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(name, str | None) for name in node)
