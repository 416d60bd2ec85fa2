# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Declares the parameters of a layer: shape, logical axes, role, the dimensions of the matrix.

A layer declares each parameter once. Every dimension of a parameter is an input of its matrix, an
output, or batch (layers, experts). `jaxmoe.parameters` has the table of a whole model.

To add a role: `Role` in `jaxmoe/declarations.py`, its class in ROLE_CLASSES of
`jaxmoe/scaling/tables.py`.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array

from sharding import axes as ax
from sharding.products.low_rank import Awaited, LowRank, Mix
from sharding.products.quantized import Packed, Weight

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
    "memory_key",
    "memory_value",
    "norm",
    "state",
    "connection",
    "connection_bias",
    "head",
    "adapter",
]
ROLES: Final[tuple[Role, ...]] = Role.__args__  # pyright: ignore[reportAttributeAccessIssue]

_OWN_DTYPE_ROLES: Final[frozenset[Role]] = frozenset(
    (
        "router",
        "router_residual",
        "router_noise",
        "constant",
        "constant_mix",
        "state",
        "connection",
        "connection_bias",
        "memory_key",
    )
)
FACTORS: Final = ("down", "up", "scale")
"""Parameters beside a matrix, named `<matrix>:<factor>`, of which an adapter makes an addition to
it; see `sharding/products/low_rank.py`."""
MIXED_FACTORS: Final = ("downs", "ups", "scale")
"""Those of an adapter that makes several additions and mixes them for each token."""
VALUES: Final = "values"
"""A further factor, of each column of `down`, that some adapters have."""

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
    init: (
        Literal["normal", "ones", "zeros", "near_zero", "fan_in", "log_range", "softplus_range"]
        | tuple[float, ...]
    ) = "normal"
    """Initial values: normal with the deviation of the parameterisation; ones; zeros; uniform in
    +-1e-3; uniform in +-1/sqrt(fan_in); log(1), log(2), ... along the last dimension; the inverse
    of softplus of values whose logarithm is uniform from log(1e-3) to log(0.1); or those given, of
    a vector."""
    dtype: Literal["int32"] | None = None
    """Dtype of the stored values; that of the model's parameters when None."""
    share: float = 1.0
    """Part of the values that one token reads, where it looks up rows of a table."""
    is_whole: bool = False
    """The layer uses the matrix as one array, in which an adapter's addition is summed up."""

    def __post_init__(self):
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.shape)} dimensions {self.shape} but axes {self.axes}")

    def fan(self, side: Literal[0, 1]) -> int:
        """Return the number of inputs (0) or outputs (1) of the matrix; 1 for a vector."""
        return 1 if self.matrix is None else math.prod(self.shape[d] for d in self.matrix[side])

    def own_values(self, key: Array) -> Array:
        """Return the initial f32 values of a parameter for which no parameterisation has others.

        Args:
            key: PRNG key of the parameter.
        """
        match self.init:
            case tuple():
                return jnp.asarray(self.init, jnp.float32).reshape(self.shape)
            case "ones" | "zeros":
                return (jnp.ones if self.init == "ones" else jnp.zeros)(self.shape, jnp.float32)
            case "log_range":
                numbers = jnp.arange(1, self.shape[-1] + 1, dtype=jnp.float32)
                return jnp.broadcast_to(jnp.log(numbers), self.shape)
            case "near_zero" | "fan_in":
                edge = 1e-3 if self.init == "near_zero" else 1.0 / math.sqrt(self.fan(0))
                return jax.random.uniform(key, self.shape, jnp.float32, minval=-edge, maxval=edge)
            case "softplus_range":
                low, high = (math.log(end) for end in (1e-3, 0.1))
                logs = jax.random.uniform(key, self.shape, jnp.float32, minval=low, maxval=high)
                steps = jnp.exp(logs)
                return steps + jnp.log(-jnp.expm1(-steps))
            case _:
                return jax.random.normal(key, self.shape, jnp.float32) / math.sqrt(self.fan(0))

    @property
    def is_stacked(self) -> bool:
        """Whether the first dimension counts layers."""
        return self.axes[:1] in ((ax.LAYERS,), (ax.OTHER_LAYERS,))

    @property
    def is_used_as_stored(self) -> bool:
        """Whether the layer computes with the parameter in its own dtype, as routers do."""
        return self.role in _OWN_DTYPE_ROLES

    def as_used(self, value: Array, dtype: Any) -> Array:
        """Return a value in the dtype that the layer computes with.

        Args:
            value: The parameter, or one of its layers.
            dtype: Dtype of matrices in products; routers and gains keep theirs.
        """
        return value if self.is_used_as_stored or value.ndim < 2 else value.astype(dtype)


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
        axes = list(self.declaration.axes)
        shape = list(self.declaration.shape)
        del axes[index], shape[index]
        single = dataclasses.replace(self.declaration, axes=tuple(axes), shape=tuple(shape))
        return dataclasses.replace(self, declaration=single)

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Return the fields, which `flax.nnx.bridge` keeps with its variable."""
        return {"value": self.value, "declaration": self.declaration}

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> Declared:
        """Return the box of a variable of `flax.nnx.bridge`.

        Args:
            metadata: Value and metadata of the variable, of which some are its own.
        """
        return cls(value=metadata["value"], declaration=metadata["declaration"])


@struct.dataclass
class Deferred:
    """A stored parameter and the function that a layer applies when it declares it."""

    value: Any
    read: Callable[[Any, Declaration], Any] = struct.field(pytree_node=False)


def declare(module: nn.Module, name: str, declaration: Declaration) -> Array:
    """Return `module.param` with a declaration, and the addition of an adapter if it has one.

    Its initial value is f32.

    Args:
        module: Linen module that owns the parameter.
        name: Name in the module; changing it changes the initial value.
        declaration: Shape, axes and role of the parameter.
    """
    declaration = dataclasses.replace(declaration, is_whole=True)
    value = _adapt(module, name, _declare_matrix(module, name, declaration))
    return value.merge() if isinstance(value, LowRank) else value


def _declare_matrix(module: nn.Module, name: str, declaration: Declaration) -> Any:
    def initialise(key: Array) -> Declared:
        return Declared(value=declaration.own_values(key), declaration=declaration)

    value = module.param(name, initialise)
    return value.read(value.value, declaration) if isinstance(value, Deferred) else value


def _adapt(module: nn.Module, name: str, weight: Any) -> Any:
    """Return a matrix with the addition of an adapter, if its factors are among the parameters."""
    is_mixed = module.has_variable("params", f"{name}:{MIXED_FACTORS[0]}")
    names = [f"{name}:{factor}" for factor in (MIXED_FACTORS if is_mixed else FACTORS)]
    if not module.has_variable("params", names[0]):
        return weight
    if module.has_variable("params", f"{name}:{VALUES}"):
        names.append(f"{name}:{VALUES}")
    given = [module.get_variable("params", one) for one in names]
    down, up, scale, *values = map(_read, given)
    mix = Awaited() if is_mixed else None
    added = LowRank(weight=weight, down=down, up=up, scale=scale, mix=mix)
    return added.with_values(values[0] if values else None)


def own_of(module: nn.Module, name: str) -> dict[str, Array]:
    """Return the parameters `<name>:<key>` of an adapter in a module, by key.

    Args:
        module: Linen module that holds them; it need not declare them.
        name: What they stand beside: a parameter of the module, or a half of a layer.
    """
    variables: Any = module.variables.get("params", {})
    own_values = {path: value for path, value in variables.items() if path.startswith(f"{name}:")}
    return {path.removeprefix(f"{name}:"): _read(value) for path, value in own_values.items()}


def _read(value: Any) -> Any:
    """Return the value of a parameter of an adapter."""
    return value.read(value.value, _FACTOR) if isinstance(value, Deferred) else value


_FACTOR: Final = Declaration(shape=(), axes=(), role="adapter", matrix=None)
"""What the reader of a deferred factor is told of it."""


def declare_matrix(module: nn.Module, name: str, declaration: Declaration) -> Weight:
    """Return `declare` for a matrix that may be quantised (`jaxmoe.models.quantize`) or adapted.

    Args:
        module: Linen module that owns the parameter.
        name: Name in the module.
        declaration: Shape, axes and role of the parameter.

    Raises:
        ValueError: The quantised matrix has another shape.
    """
    value = module.get_variable("params", name) if module.has_variable("params", name) else None
    if isinstance(value, Deferred) and isinstance(value.value, Packed):
        value = value.read(value.value, declaration)
    if not isinstance(value, Packed):
        return _adapt(module, name, _declare_matrix(module, name, declaration))
    if value.shape != declaration.shape:
        where = "/".join((*module.path, name))
        raise ValueError(
            f"{where}: a quantised matrix {value.shape} was given for {declaration.shape}: use the"
            " parameters with the model that they were trained with"
        )
    return _adapt(module, name, value)


def as_factor(matrix: Weight, dtype: Any, mix: Mix | None = None) -> Weight:
    """Return a matrix in the dtype of the activations; a quantised one stays as it is.

    Args:
        matrix: Matrix in any form.
        dtype: Dtype of the activations.
        mix: How an adapter's additions are mixed for each token; see `TokenInputs.mix`.
    """
    if isinstance(matrix, LowRank):
        weight = as_factor(matrix.weight, dtype)
        return dataclasses.replace(matrix.factors_as(dtype), weight=weight).mixed_by(mix)
    return matrix if isinstance(matrix, Packed) else matrix.astype(dtype)


def draw(declarations: Mapping[str, Declaration], key: Array) -> dict[str, Array]:
    """Return parameters outside a model: normal of variance 1/fan_in, ones, or zeros."""
    return {
        name: declaration.own_values(fold_path(key, name))
        for name, declaration in declarations.items()
    }


def fold_path(key: Array, path: str) -> Array:
    """Return a key that depends on the given key and the path only."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()))
