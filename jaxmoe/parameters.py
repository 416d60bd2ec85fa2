# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Declarations of parameters, and the table of all parameters of a model.

A layer declares each parameter once: shape, logical axes, role, the dimensions of its matrix.
`ParameterTable` has one row per parameter of a whole model; initialisation, parameterisation,
optimiser groups, sharding and the checkpoint manifest read it.
`jaxmoe.scaling.initialize.parameter_table` builds it with `jax.eval_shape`.

Every dimension of a parameter is an input of its matrix, an output, or batch (layers, experts).

To add a role: `Role` in `jaxmoe/parameters.py`, its class in ROLE_CLASSES of
`jaxmoe/scaling/tables.py`.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, cast

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct, traverse_util
from jax.sharding import PartitionSpec
from jaxtyping import Array

from pallas_kernels import QuantizedArray
from sharding import axes as ax
from sharding.rules import LogicalAxisRules

Role = Literal[
    "embedding",
    "attention_in",
    "attention_out",
    "attention_gate",
    "mlp_in",
    "mlp_out",
    "shared_in",
    "shared_out",
    "expert_in",
    "expert_out",
    "router",
    "router_residual",
    "router_noise",
    "constant",
    "constant_mix",
    "norm",
    "head",
]
ROLES: Final[tuple[Role, ...]] = Role.__args__  # pyright: ignore[reportAttributeAccessIssue]

Group = str
"""Name of an optimiser group, defined by an optimiser config, or FROZEN."""
FROZEN: Final = "frozen"
"""Group of parameters that are not trained: no gradient, no optimiser state, no update."""

_OWN_DTYPE_ROLES: Final[frozenset[Role]] = frozenset(
    ("router", "router_residual", "router_noise", "constant", "constant_mix")
)

FIELDS: Final[Mapping[str, str]] = {
    ax.EXPERTS: "model.moe.num_experts",
    ax.EXPERT_MLP: "model.moe.expert_dim",
    ax.HEADS: "model.attention.num_heads",
    ax.KV_HEADS: "model.attention.num_kv_heads",
    ax.VOCAB: "model.vocab_size",
}
"""Config field that sets the size of a logical axis."""

Dims = tuple[int, ...]
MatrixAxes = tuple[Dims, Dims]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One parameter as its layer declares it, before layers are stacked."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension."""
    role: Role
    matrix: MatrixAxes | None = ((-2,), (-1,))
    """Input and output dimensions of the matrix, negative; None for a vector of gains."""
    init: Literal["normal", "ones", "zeros"] = "normal"

    def __post_init__(self):
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.shape)} dimensions {self.shape} but axes {self.axes}")

    def fan(self, side: Literal[0, 1]) -> int:
        """Return the number of inputs (0) or outputs (1) of the matrix; 1 for a vector."""
        return 1 if self.matrix is None else math.prod(self.shape[d] for d in self.matrix[side])

    @property
    def is_used_as_stored(self) -> bool:
        """Whether the layer computes with the parameter in its own dtype, as routers do."""
        return self.role in _OWN_DTYPE_ROLES


@struct.dataclass
class Declared(nn.meta.AxisMetadata[Any]):
    """Box that holds a parameter and its declaration while Linen initialises."""

    value: Any
    declaration: Declaration = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """Return the bare parameter."""
        return self.value

    def replace_boxed(self, val: Any) -> Declared:
        """Return the same box with another value."""
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Declared:
        """Return the box with the dimension that a scan over layers puts in front."""
        axes = list(self.declaration.axes)
        axes.insert(index, params[nn.PARTITION_NAME])
        shape = list(self.declaration.shape)
        shape.insert(index, params["size"])
        stacked = dataclasses.replace(self.declaration, axes=tuple(axes), shape=tuple(shape))
        return dataclasses.replace(self, declaration=stacked)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Declared:
        """Return the inverse of `add_axis`."""
        del params
        axes, shape = list(self.declaration.axes), list(self.declaration.shape)
        del axes[index], shape[index]
        single = dataclasses.replace(self.declaration, axes=tuple(axes), shape=tuple(shape))
        return dataclasses.replace(self, declaration=single)


@struct.dataclass
class Deferred:
    """A stored parameter and the function that a layer applies when it declares it."""

    value: Any
    read: Callable[[Any, Declaration], Any] = struct.field(pytree_node=False)


def declare(module: nn.Module, name: str, declaration: Declaration) -> Array:
    """Return `module.param` with a declaration; its initial value is f32.

    Args:
        module: Linen module that owns the parameter.
        name: Name in the module; changing it changes the initial value.
        declaration: Shape, axes and role of the parameter.
    """

    def initialise(key: Array) -> Declared:
        return Declared(value=_draw_one(declaration, key), declaration=declaration)

    value = module.param(name, initialise)
    if isinstance(value, Deferred):
        value = value.read(value.value, declaration)
    return cast(Array, value)


def declare_matrix(
    module: nn.Module, name: str, declaration: Declaration
) -> Array | QuantizedArray:
    """Return `declare` for a matrix that may be quantised; see `jaxmoe.models.quantize`.

    Args:
        module: Linen module that owns the parameter.
        name: Name in the module.
        declaration: Shape, axes and role of the parameter.

    Raises:
        ValueError: The quantised matrix has another shape.
    """
    given = module.get_variable("params", name) if module.has_variable("params", name) else None
    if isinstance(given, Deferred) and isinstance(given.value, QuantizedArray):
        given = given.read(given.value, declaration)
    if not isinstance(given, QuantizedArray):
        return declare(module, name, declaration)
    if given.shape != declaration.shape:
        where = "/".join((*module.path, name))
        raise ValueError(
            f"{where}: a quantised matrix {given.shape} was given for {declaration.shape}: use the"
            " parameters with the model that they were trained with"
        )
    return given


def as_factor(matrix: Array | QuantizedArray, dtype: Any) -> Array | QuantizedArray:
    """Return a matrix in the dtype of the activations; a quantised one stays as it is."""
    return matrix if isinstance(matrix, QuantizedArray) else matrix.astype(dtype)


def draw(declarations: Mapping[str, Declaration], key: Array) -> dict[str, Array]:
    """Return parameters outside a model: normal of variance 1/fan_in, ones, or zeros."""
    return {
        name: _draw_one(declaration, fold_path(key, name))
        for name, declaration in declarations.items()
    }


def _draw_one(declaration: Declaration, key: Array) -> Array:
    if declaration.init != "normal":
        return _constant(declaration, jnp.float32)
    return jax.random.normal(key, declaration.shape, jnp.float32) / math.sqrt(declaration.fan(0))


def _constant(declaration: Declaration, dtype: Any) -> Array:
    fill = jnp.ones if declaration.init == "ones" else jnp.zeros
    return fill(declaration.shape, dtype)


def fold_path(key: Array, path: str) -> Array:
    """Return a key that depends on the given key and the path only."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


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
        """Standard deviation of the initial values; 0 for constant ones."""
        if self.declaration.init != "normal":
            return 0.0
        return self.hyper.init_std * self.declaration.fan(0) ** self.hyper.fan_in_power

    @property
    def is_frozen(self) -> bool:
        """Whether the parameter is not trained."""
        return self.hyper.group == FROZEN

    def initial_value(self, key: Array, dtype: Any) -> Array:
        """Return the initial value, which depends on the key and the path and not on the mesh."""
        if self.declaration.init != "normal":
            return _constant(self.declaration, dtype)
        key = fold_path(key, self.path)
        if self.hyper.distribution == "uniform":
            edge = math.sqrt(3.0)
            noise = jax.random.uniform(key, self.shape, jnp.float32, minval=-edge, maxval=edge)
        else:
            noise = jax.random.normal(key, self.shape, jnp.float32)
        return (noise * jnp.float32(self.init_std)).astype(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterTable:
    """All parameters of a model, in the order of their paths."""

    rows: tuple[ParameterSpec, ...]

    def __iter__(self) -> Iterator[ParameterSpec]:
        return iter(self.rows)

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

    def trained(self, tree: Any) -> Any:
        """Return the tree with `optax.MaskedNode` in place of frozen parameters.

        Args:
            tree: Tree like the parameters; frozen ones may be masked already.
        """
        if not self.has_frozen:
            return tree
        is_frozen = self.tree(lambda row: row.is_frozen)
        return jax.tree.map(lambda f, leaf: optax.MaskedNode() if f else leaf, is_frozen, tree)

    def merged(self, trained: Any, whole: Any) -> Any:
        """Return the trained parameters of one tree with the frozen parameters of another.

        Args:
            trained: Result of `trained`.
            whole: Tree like the parameters.
        """
        if not self.has_frozen:
            return trained
        is_frozen = self.tree(lambda row: row.is_frozen)
        return jax.tree.map(lambda f, new, old: old if f else new, is_frozen, trained, whole)

    def check_divides(self, rules: LogicalAxisRules, mesh_shape: Mapping[str, int]) -> None:
        """Refuse a parameter that the mesh does not divide.

        Args:
            rules: Logical to mesh axes.
            mesh_shape: Size of each mesh axis.

        Raises:
            ValueError: A dimension does not divide; names the parameter and both sizes.
        """
        for row in self:
            axes = row.declaration.axes
            rules.check_divides(row.path, row.shape, axes, mesh_shape, FIELDS)

    @property
    def total(self) -> int:
        """Number of values of all parameters."""
        return sum(row.size for row in self)

    def active(self, top_k: int, num_experts: int) -> int:
        """Return the values that one token uses: top_k of num_experts routed experts."""
        routed = sum(row.size for row in self if ax.EXPERTS in row.declaration.axes)
        return self.total - routed + routed * top_k // max(num_experts, 1)

    def text(self) -> str:
        """Return the table as aligned text, one parameter per line."""
        head = ("path", "shape", "axes", "matrix", "fan_in", "fan_out", "role", "init_std")
        head += ("lr", "decay", "group", "spec")
        lines = [head, *(_cells(row) for row in self)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def _cells(row: ParameterSpec) -> tuple[str, ...]:
    declaration, hyper, initial = row.declaration, row.hyper, row.declaration.init
    if initial == "normal":
        initial = f"{'u' if hyper.distribution == 'uniform' else ''}{row.init_std:.6g}"
    if declaration.matrix is None:
        matrix = "-"
    else:
        sides = ("*".join(declaration.axes[d] for d in dims) for dims in declaration.matrix)
        matrix = "->".join(sides)
    places = ["-" if e is None else e if isinstance(e, str) else "+".join(e) for e in row.spec]
    return (
        row.path,
        "x".join(map(str, row.shape)),
        ",".join(declaration.axes),
        matrix,
        str(declaration.fan(0)),
        str(declaration.fan(1)),
        declaration.role,
        initial,
        f"{hyper.learning_rate_multiplier:g}",
        f"{hyper.weight_decay_multiplier:g}",
        hyper.group,
        f"P({', '.join(places)})",
    )
