# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lists all parameters of a model in a table, one row each.

Initialisation, parameterisation, optimiser groups, sharding and the checkpoint manifest read
`ParameterTable`. `jaxmoe.scaling.initialize.parameter_table` builds it with `jax.eval_shape` from
the declarations of the layers (`jaxmoe.declarations`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxmoe.declarations import Declaration, fold_path
from sharding import axes as ax
from sharding.rules import LogicalAxisRules

Group = str
"""Name of an optimiser group, defined by an optimiser config, or FROZEN."""
FROZEN: Final = "frozen"
"""Group of parameters that are not trained: no gradient, no optimiser state, no update."""

FIELDS: Final[Mapping[str, str]] = {
    ax.EXPERTS: "model.moe.num_experts",
    ax.EXPERT_MLP: "model.moe.expert_dim",
    ax.VOCAB: "model.vocab_size",
}
"""Config field that sets the size of a logical axis in every layer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Numbers that a parameterisation gives to one role."""

    init_std: float = 1.0
    """Standard deviation at fan_in 1."""
    fan_in_power: float = -0.5
    """init std = init_std * fan_in ** fan_in_power."""
    distribution: Literal["normal", "uniform"] = "normal"
    """Distribution of the initial values; uniform spans +-sqrt(3) times init_std."""
    learning_rate_multiplier: float = 1.0
    """Factor on the learning rate."""
    weight_decay_multiplier: float = 1.0
    """Factor on the optimiser's weight decay."""
    has_independent_decay: bool = False
    """Whether the decay is w - decay * schedule * w, without the learning rate."""
    epsilon_multiplier: float = 1.0
    """Factor on the epsilon of Adam."""
    group: Group = "adamw"
    """Optimiser group; `frozen` for a parameter that is not trained."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One row of the parameter table."""

    path: str
    """Names from the root, joined by '/'."""
    declaration: Declaration
    """Declaration of the stacked parameter."""
    hyper: Hyperparameters
    """Numbers of the parameterisation for the role."""
    spec: PartitionSpec
    """Partition spec, from the sharding rules."""
    fields: tuple[tuple[str, str], ...] = ()
    """Logical axes whose size a field of the layer's mixer sets, and its dotted path."""
    drawn_as: str | None = None
    """Path of the parameter with the same initial value; None for a value of its own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Whole shape, layers and experts included."""
        return self.declaration.shape

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def init_std(self) -> float:
        """Standard deviation of the initial values; 0 for those that the declaration fixes."""
        if self.declaration.init != "normal":
            return 0.0
        return self.hyper.init_std * self.declaration.fan(0) ** self.hyper.fan_in_power

    @property
    def is_frozen(self) -> bool:
        """Whether the parameter is not trained."""
        return self.hyper.group == FROZEN

    def stored_dtype(self, dtype: Any) -> Any:
        """Return the dtype of the values, where those of the model have the given one."""
        return jnp.dtype(self.declaration.dtype or dtype)

    def initial_value(self, key: Array, dtype: Any, *, is_whole: bool = False) -> Array:
        """Return the initial value, which depends on the key and the path and not on the mesh.

        Args:
            key: Key of the model.
            dtype: Dtype of the model's parameters.
            is_whole: Whether one device holds the value. It is then drawn flat, which compiles
                several times as fast; a value that is cut must be drawn in its shape.
        """
        key = fold_path(key, self.drawn_as or self.path)
        dtype = self.stored_dtype(dtype)
        if self.declaration.init != "normal":
            return self.declaration.own_values(key).astype(dtype)
        # The numbers of this generator are counted along the flat array.
        is_flat = is_whole and jax.random.key_impl(key) == "threefry2x32"
        shape = (self.size,) if is_flat else self.shape
        if self.hyper.distribution == "uniform":
            edge = math.sqrt(3.0)
            noise = jax.random.uniform(key, shape, jnp.float32, minval=-edge, maxval=edge)
        else:
            noise = jax.random.normal(key, shape, jnp.float32)
        return (noise.reshape(self.shape) * jnp.float32(self.init_std)).astype(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterTable:
    """All parameters of a model, in the order of their paths."""

    rows: tuple[ParameterSpec, ...]

    def __iter__(self) -> Iterator[ParameterSpec]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> ParameterSpec:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def tree(self, function: Any) -> dict[str, Any]:
        """Return the nested dict of `function(row)` with the structure of the parameters."""
        return traverse_util.unflatten_dict({row.path: function(row) for row in self}, sep="/")

    @property
    def has_frozen(self) -> bool:
        """Whether any parameter is not trained."""
        return any(row.is_frozen for row in self)

    @property
    def trained_rows(self) -> tuple[ParameterSpec, ...]:
        """Rows of the parameters that are trained."""
        return tuple(row for row in self if not row.is_frozen)

    def select_trained(self, tree: Any) -> Any:
        """Return the tree with `optax.MaskedNode` in place of frozen parameters.

        Args:
            tree: Tree like the parameters; frozen ones may be masked already.
        """
        if not self.has_frozen:
            return tree
        is_frozen = self.tree(lambda row: row.is_frozen)
        return jax.tree.map(lambda f, leaf: optax.MaskedNode() if f else leaf, is_frozen, tree)

    def merge(self, trained: Any, other_tree: Any) -> Any:
        """Return the trained parameters of one tree with the frozen parameters of another.

        Args:
            trained: Result of `select_trained`.
            other_tree: Tree like the parameters.
        """
        if not self.has_frozen:
            return trained
        is_frozen = self.tree(lambda row: row.is_frozen)
        return jax.tree.map(lambda f, new, old: old if f else new, is_frozen, trained, other_tree)

    def check_divides(self, rules: LogicalAxisRules, mesh_shape: Mapping[str, int]) -> None:
        """Refuse a parameter that the mesh does not divide.

        Args:
            rules: Logical to mesh axes.
            mesh_shape: Size of each mesh axis.

        Raises:
            ValueError: A dimension does not divide; names the parameter and both sizes.
        """
        shards = {
            name: math.prod(mesh_shape[axis] for axis in rules.mesh_axes(name))
            for name in {name for row in self for name in row.declaration.axes}
        }
        for row in self:
            axes = row.declaration.axes
            if any(size % shards[name] for size, name in zip(row.shape, axes, strict=True)):
                fields = {**FIELDS, **dict(row.fields)}
                rules.check_divides(row.path, row.shape, axes, mesh_shape, fields)

    @property
    def total(self) -> int:
        """Number of values of all parameters."""
        return sum(row.size for row in self)

    def active(self, top_k: int, num_experts: int) -> int:
        """Return the values that one token uses: top_k of num_experts routed experts, read rows."""
        routed = sum(row.size for row in self if ax.EXPERTS in row.declaration.axes)
        unread = sum(row.size - round(row.size * row.declaration.share) for row in self)
        return self.total - unread - routed + routed * top_k // max(num_experts, 1)

    def text(self) -> str:
        """Return two tables as aligned text: values by parameter, and axes by parameter."""
        values = [_VALUE_HEADINGS, *(_values(row) for row in self)]
        axes = [_AXES_HEADINGS, *((row.path, _axes(row)) for row in self)]
        return f"{_VALUE_LEGEND}\n\n{_align(values)}\n\n{_AXES_LEGEND}\n\n{_align(axes)}"


_VALUE_HEADINGS = ("path", "shape", "role", "group", "init_std", "lr", "decay", "fans")
_VALUE_LEGEND = """\
role: selects the initial scale and multipliers; group: optimiser; init_std: standard deviation of
initial values (u: uniform; ones, zeros: constant); lr, decay: multipliers of the learning rate and
of weight decay; fans: input -> output size of the matrix"""
_AXES_HEADINGS = ("path", "axes")
_AXES_LEGEND = """\
axes: stacked axes: input axes -> output axes of the matrix; =data+expert: mesh axes that an axis
is sharded over"""


def _align(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _axes(row: ParameterSpec) -> str:
    """Return logical axes and the mesh axes of each, with an arrow between the matrix's sides."""
    declaration = row.declaration
    names = []
    for name, place in zip(declaration.axes, row.spec, strict=True):
        over = "" if place is None else place if isinstance(place, str) else "+".join(place)
        names.append(f"{name}={over}" if over else name)
    if declaration.matrix is None:
        return ", ".join(names) or "-"
    sides = [", ".join(names[dim] for dim in dims) for dims in declaration.matrix]
    inside = {dim % len(names) for dims in declaration.matrix for dim in dims}
    stacked = ", ".join(name for dim, name in enumerate(names) if dim not in inside)
    return f"{stacked}: {' -> '.join(sides)}" if stacked else " -> ".join(sides)


def _values(row: ParameterSpec) -> tuple[str, ...]:
    declaration = row.declaration
    hyper = row.hyper
    initial = row.declaration.init
    if isinstance(initial, tuple):
        initial = "given"
    elif initial == "normal":
        initial = f"{'u' if hyper.distribution == 'uniform' else ''}{row.init_std:.6g}"
    return (
        row.path,
        "x".join(map(str, row.shape)),
        declaration.role,
        hyper.group,
        initial,
        f"{hyper.learning_rate_multiplier:g}",
        f"{hyper.weight_decay_multiplier:g}",
        f"{declaration.fan(0)}->{declaration.fan(1)}",
    )
