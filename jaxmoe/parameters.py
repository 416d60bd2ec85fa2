# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Declarations of parameters, and the table made of them: the spine of the library.

A layer declares each parameter once: shape, logical axes, role, which dimensions form its matrix.
`ParameterTable` is one row per parameter of a whole model; initialisation, parameterisation,
optimiser groups, sharding and the checkpoint manifest all read it, and a golden text file shows it
in review. `jaxmoe.scaling.initialize.parameter_table` builds it with `jax.eval_shape`.

Every dimension of a parameter is an input of its matrix, an output, or batch (layers, experts).

To add a role: a name in ROLES, a row in every parameterisation of `jaxmoe/scaling/`.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, cast

import jax
import jax.numpy as jnp
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

Group = Literal["adamw", "muon", "muonh", "adamh"]
"""Optimiser groups: those that end in h keep each matrix on its sphere."""

FIELDS: Final[Mapping[str, str]] = {
    ax.EXPERTS: "model.moe.num_experts",
    ax.EXPERT_MLP: "model.moe.expert_dim",
    ax.HEADS: "model.attention.num_heads",
    ax.KV_HEADS: "model.attention.num_kv_heads",
    ax.VOCAB: "model.vocab_size",
}
"""The field of the config that decides the size of a logical axis, where there is one."""

Dims = tuple[int, ...]
MatrixAxes = tuple[Dims, Dims]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a layer says of one parameter, before layers are stacked."""

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
        """Inputs (0) or outputs (1) of the matrix; 1 for a vector."""
        return 1 if self.matrix is None else math.prod(self.shape[d] for d in self.matrix[side])


@struct.dataclass
class Declared(nn.meta.AxisMetadata[Any]):
    """A parameter boxed with its declaration while Linen initialises."""

    value: Any
    declaration: Declaration = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """The bare parameter."""
        return self.value

    def replace_boxed(self, val: Any) -> Declared:
        """The same box round another value."""
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Declared:
        """Notes the dimension that a scan over layers puts in front."""
        axes = list(self.declaration.axes)
        axes.insert(index, params[nn.PARTITION_NAME])
        shape = list(self.declaration.shape)
        shape.insert(index, params["size"])
        stacked = dataclasses.replace(self.declaration, axes=tuple(axes), shape=tuple(shape))
        return dataclasses.replace(self, declaration=stacked)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Declared:
        """The inverse of `add_axis`."""
        del params
        axes, shape = list(self.declaration.axes), list(self.declaration.shape)
        del axes[index], shape[index]
        single = dataclasses.replace(self.declaration, axes=tuple(axes), shape=tuple(shape))
        return dataclasses.replace(self, declaration=single)


def declare(module: nn.Module, name: str, declaration: Declaration) -> Array:
    """`module.param` with a declaration; the value has the shape declared, in f32 at first.

    Args:
        module: the Linen module that owns the parameter.
        name: its name there; changing it changes the initial value.
        declaration: what it is.
    """

    def initialise(key: Array) -> Declared:
        return Declared(value=_draw_one(declaration, key), declaration=declaration)

    return cast(Array, module.param(name, initialise))


def declare_matrix(
    module: nn.Module, name: str, declaration: Declaration
) -> Array | QuantizedArray:
    """`declare` for a matrix that may come quantised: see `jaxmoe.models.quantize`.

    Args:
        module: the Linen module that owns the parameter.
        name: its name there.
        declaration: what it is.

    Raises:
        ValueError: a quantised matrix of another shape.
    """
    given = module.get_variable("params", name) if module.has_variable("params", name) else None
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
    """A matrix as a product takes it: in the dtype of the activations, or quantised as it is."""
    return matrix if isinstance(matrix, QuantizedArray) else matrix.astype(dtype)


def draw(declarations: Mapping[str, Declaration], key: Array) -> dict[str, Array]:
    """Values of a few parameters outside a model: normal of variance 1/fan_in, ones, or zeros."""
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
    """A key that depends on a path and on nothing else."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """What a parameterisation says of one role."""

    init_std: float = 1.0
    """Standard deviation at fan_in 1."""
    fan_in_power: float = -0.5
    """init std = init_std * fan_in ** fan_in_power."""
    distribution: Literal["normal", "uniform"] = "normal"
    """Of the initial values; the uniform one reaches from -sqrt(3) to sqrt(3) times init_std."""
    learning_rate_multiplier: float = 1.0
    """Times the schedule."""
    weight_decay_multiplier: float = 1.0
    """Times the optimiser's weight decay."""
    has_independent_decay: bool = False
    """The decay follows the schedule alone, w - decay * schedule * w, and not the learning rate."""
    epsilon_multiplier: float = 1.0
    """Times the epsilon of AdamW."""
    group: Group = "adamw"
    """Optimiser group."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One row of the table."""

    path: str
    """Names from the root, joined by '/'."""
    declaration: Declaration
    """Of the stacked parameter."""
    hyper: Hyperparameters
    """From the parameterisation, by role."""
    spec: PartitionSpec
    """Where it lies, from the rules."""

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
        """Standard deviation of the initial values; 0 for those that all start at 1 or 0."""
        if self.declaration.init != "normal":
            return 0.0
        return self.hyper.init_std * self.declaration.fan(0) ** self.hyper.fan_in_power

    def initial_value(self, key: Array, dtype: Any) -> Array:
        """Depends on the path and on nothing else, the mesh least of all."""
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
        """The nested dict of `function(row)` that has the structure of the parameters."""
        return traverse_util.unflatten_dict({row.path: function(row) for row in self}, sep="/")

    def check_divides(self, rules: LogicalAxisRules, mesh_shape: Mapping[str, int]) -> None:
        """Refuses a parameter that the mesh does not divide.

        Raises:
            ValueError: naming the parameter, the dimension, both sizes and the way out.
        """
        for row in self:
            axes = row.declaration.axes
            rules.check_divides(row.path, row.shape, axes, mesh_shape, FIELDS)

    @property
    def total(self) -> int:
        """Parameters of the model."""
        return sum(row.size for row in self)

    def active(self, top_k: int, num_experts: int) -> int:
        """Parameters that one token meets: of the routed experts, top_k of num_experts."""
        routed = sum(row.size for row in self if ax.EXPERTS in row.declaration.axes)
        return self.total - routed + routed * top_k // max(num_experts, 1)

    def text(self) -> str:
        """The table as aligned text, one parameter a line: what the golden files hold."""
        head = ("path", "shape", "axes", "matrix", "fan_in", "fan_out", "role", "init_std")
        head += ("lr", "decay", "group", "spec")
        lines = [head, *(_cells(row) for row in self)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def _initial(row: ParameterSpec) -> str:
    if row.declaration.init != "normal":
        return row.declaration.init
    mark = "u" if row.hyper.distribution == "uniform" else ""
    return f"{mark}{row.init_std:.6g}"


def _cells(row: ParameterSpec) -> tuple[str, ...]:
    declaration, hyper = row.declaration, row.hyper
    if declaration.matrix is None:
        matrix = "-"
    else:
        sides = ("*".join(declaration.axes[d] for d in dims) for dims in declaration.matrix)
        matrix = "->".join(sides)
    return (
        row.path,
        "x".join(map(str, row.shape)),
        ",".join(declaration.axes),
        matrix,
        str(declaration.fan(0)),
        str(declaration.fan(1)),
        declaration.role,
        _initial(row),
        f"{hyper.learning_rate_multiplier:g}",
        f"{hyper.weight_decay_multiplier:g}",
        hyper.group,
        f"P({', '.join('-' if entry is None else _entry(entry) for entry in row.spec)})",
    )


def _entry(entry: str | tuple[str, ...]) -> str:
    return entry if isinstance(entry, str) else "+".join(entry)
