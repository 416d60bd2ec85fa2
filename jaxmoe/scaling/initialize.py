# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the parameter table of a model, and initial values from it.

The table comes from `jax.eval_shape` and computes no value: a trillion parameters take a second.
Initial values depend on the seed and on each parameter's path, not on the mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh
from jaxtyping import Array

from jaxmoe.declarations import Declaration, Declared
from jaxmoe.execution import ExecutionConfig, KernelsConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.parameters import ParameterSpec, ParameterTable
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.parameterization import Parameterization
from jaxmoe.scaling.standard import standard
from sharding.axes import MESH_AXES, is_our_mesh
from sharding.constrain import Placement, without_mesh
from sharding.mesh import named_shardings
from sharding.rules import FULLY_SHARDED, LogicalAxisRules

# Explicit choices: resolving "auto" would initialise a backend.
_SHAPES_ONLY = ExecutionConfig(
    unroll=1,
    precision=PrecisionPolicy(compute="float32"),
    kernels=KernelsConfig(attention="reference", grouped_swiglu="reference"),
)


@functools.lru_cache(maxsize=64)
def parameter_table(
    model: ModelConfig,
    parameterization: Parameterization | None = None,
    rules: LogicalAxisRules = FULLY_SHARDED,
) -> ParameterTable:
    """Return the parameter table of a model.

    Args:
        model: Model with the parameters.
        parameterization: Initial scale, multipliers and group per role; None is standard.
        rules: Logical to mesh axes.

    Raises:
        ValueError: The parameterisation has no row for a parameter's role.
    """
    parameterization = parameterization or standard(model)
    rows = []
    for path, declaration in _declarations(model).items():
        spec = rules.resolve(declaration.axes)
        try:
            hyper = parameterization.of(declaration.role)
        except ValueError as error:
            raise ValueError(f"parameter {path}: {error}") from error
        fields = _fields(model, path)
        row = ParameterSpec(
            path=path, declaration=declaration, hyper=hyper, spec=spec, fields=fields
        )
        rows.append(row)
    table = ParameterTable(tuple(rows))
    if model.adapter is None:
        return table
    return model.adapter.table(table, rules, model.layer_numbers)


def _fields(model: ModelConfig, path: str) -> tuple[tuple[str, str], ...]:
    """Return the dotted fields that set the axes of a mixer's parameter; none elsewhere."""
    for stack in model.stacks:
        mixer = stack.kind.mixer
        if path.startswith(f"{stack.path}/{mixer.module_name}/"):
            where = model.mixer_path(stack.layers[0])
            return tuple((axis, f"{where}.{field}") for axis, field in mixer.axis_fields.items())
    return ()


@functools.lru_cache(maxsize=64)
def _declarations(model: ModelConfig) -> dict[str, Declaration]:
    """Return the declaration of each parameter by path, sorted; traced once for all rules."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    context = {"mask_ratio": jax.ShapeDtypeStruct((1, 2), jnp.float32)}
    with without_mesh():
        key = jax.eval_shape(lambda: jax.random.key(0))
        init = Transformer(model, _SHAPES_ONLY).init
        boxed = jax.eval_shape(init, key, tokens, context=context)["params"]
    flat = traverse_util.flatten_dict(boxed, sep="/", is_leaf=lambda _, n: isinstance(n, Declared))
    return {path: leaf.declaration for path, leaf in sorted(flat.items())}


def init_params(
    model: ModelConfig,
    key: Array,
    *,
    parameterization: Parameterization | None = None,
    mesh: Mesh | None = None,
    rules: LogicalAxisRules = FULLY_SHARDED,
    dtype: Any = "float32",
    on_host: Collection[str] = (),
) -> dict[str, Any]:
    """Return initial parameters, a nested dict of arrays.

    Args:
        model: Model with the parameters.
        key: Key from `jax.random.key`; the same key gives the same values on every mesh.
        parameterization: Initial scale per role; None is standard.
        mesh: Mesh from `sharding.make_mesh`, on which the parameters are created by `rules`. None
            creates them on one device; on a mesh with other axes, place them with
            `jax.device_put`.
        rules: Logical to mesh axes.
        dtype: Dtype of the parameters.
        on_host: Names of the scans of layers whose parameters are put into host memory.

    Raises:
        ValueError: `key` is not a typed key, the model lacks the multipliers of the
            parameterisation, the mesh has other axes, or a parameter does not divide by it.
    """
    parameterized = parameterization.model if parameterization else model
    if parameterized.forward_multipliers != model.forward_multipliers:
        raise ValueError(
            "model.multipliers are not those that its parameterisation fills in, and the forward"
            " pass would go without them: use the model that the parameterisation returns"
            " (parameterization.model) everywhere"
        )
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError("init_params needs a typed key: jax.random.key(seed), not PRNGKey(seed)")
    if mesh is not None and not is_our_mesh(mesh.axis_names):
        raise ValueError(
            f"init_params lays parameters out on a mesh of sharding.make_mesh (axes"
            f" {', '.join(MESH_AXES)}), not on axes {', '.join(mesh.axis_names)}: leave mesh out"
            " and place the parameters with jax.device_put"
        )
    table = parameter_table(model, parameterization, rules)
    draw = _draw(table, mesh, rules, dtype, frozenset(on_host))
    if mesh is None:
        with without_mesh():
            return draw(key)
    return draw(key)


@functools.lru_cache(maxsize=16)
def _draw(
    table: ParameterTable,
    mesh: Mesh | None,
    rules: LogicalAxisRules,
    dtype: Any,
    on_host: frozenset[str],
) -> Callable[[Array], dict[str, Any]]:
    """Return the compiled function from a key to parameters, kept for the next call."""
    is_whole = mesh is None or mesh.size == 1

    def build(key: Array) -> dict[str, Any]:
        params = table.tree(lambda row: row.initial_value(key, dtype, is_whole=is_whole))
        away = {name: jax.device_put(params[name], jax.memory.Space.Host) for name in on_host}
        return params | away

    if mesh is None:
        return jax.jit(build)
    table.check_divides(rules, dict(mesh.shape))
    shardings = named_shardings(table.tree(lambda row: row.spec), mesh)
    for name in on_host:
        shardings[name] = jax.tree.map(
            lambda leaf_sharding: leaf_sharding.with_memory_kind("pinned_host"), shardings[name]
        )
    return jax.jit(build, out_shardings=shardings)


def lay_out(model: ModelConfig, params: Any, *, rules: LogicalAxisRules) -> Any:
    """Return a tree like the parameters, laid out by the rules.

    Args:
        model: Model with the parameters.
        params: Nested dict of arrays; frozen parameters may be masked.
        rules: Logical axes to those of the current mesh; nothing moves without an Explicit mesh.
    """
    axes = parameter_table(model).tree(lambda row: row.declaration.axes)
    place = Placement(rules)
    return jax.tree.map(
        lambda axes, leaf: jax.tree.map(lambda array: place.place(array, axes), leaf),
        axes,
        params,
        is_leaf=lambda node: isinstance(node, tuple),
    )
