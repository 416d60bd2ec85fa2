# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The parameter table of a model, and initial values made from it.

The table comes from `jax.eval_shape`: no value is computed, so the table of a trillion parameters
takes a second. Initial values depend on the seed and on each parameter's path, never on the mesh.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh
from jaxtyping import Array

from jaxmoe.execution import ExecutionConfig, KernelsConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.parameters import Declared, ParameterSpec, ParameterTable
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.parameterization import Parameterization
from jaxmoe.scaling.standard import standard
from sharding.axes import MESH_AXES, is_our_mesh
from sharding.constrain import Placement, without_mesh
from sharding.rules import FULLY_SHARDED, LogicalAxisRules
from sharding.specs import named_shardings

# Shapes need no device, so nothing here may ask which one there is.
_SHAPES_ONLY = ExecutionConfig(
    precision=PrecisionPolicy(compute="float32"),
    kernels=KernelsConfig(attention="reference", grouped_swiglu="reference"),
)


@functools.lru_cache(maxsize=64)
def parameter_table(
    model: ModelConfig,
    parameterization: Parameterization | None = None,
    rules: LogicalAxisRules = FULLY_SHARDED,
) -> ParameterTable:
    """One row per parameter of a model.

    Args:
        model: whose parameters.
        parameterization: initial scale and learning-rate multiplier per role; standard when None.
        rules: from logical axes to mesh axes.

    Raises:
        ValueError: the parameterisation says nothing of a parameter's role.
    """
    parameterization = parameterization or standard(model)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    context = {"mask_ratio": jax.ShapeDtypeStruct((1, 2), jnp.float32)}
    with without_mesh():
        key = jax.eval_shape(lambda: jax.random.key(0))
        init = Transformer(model, _SHAPES_ONLY).init
        boxed = jax.eval_shape(init, key, tokens, context=context)["params"]
    flat = traverse_util.flatten_dict(boxed, sep="/", is_leaf=lambda _, n: isinstance(n, Declared))
    rows = []
    for path, leaf in sorted(flat.items()):
        declaration = leaf.declaration
        spec = rules.resolve(declaration.axes)
        try:
            hyper = parameterization.of(declaration.role)
        except ValueError as error:
            raise ValueError(f"parameter {path}: {error}") from error
        rows.append(ParameterSpec(path=path, declaration=declaration, hyper=hyper, spec=spec))
    return ParameterTable(tuple(rows))


def init_params(
    model: ModelConfig,
    key: Array,
    *,
    parameterization: Parameterization | None = None,
    mesh: Mesh | None = None,
    rules: LogicalAxisRules = FULLY_SHARDED,
    dtype: Any = "float32",
) -> dict[str, Any]:
    """Initial parameters, a nested dict of arrays.

    Args:
        model: whose parameters.
        key: from `jax.random.key`; the same key gives the same values on every mesh.
        parameterization: initial scale per role; standard when None.
        mesh: from `sharding.make_mesh`; parameters are made in place on it, by `rules`. One
            device when None: to use axes of your own, place the result yourself.
        rules: from logical axes to mesh axes.
        dtype: of the parameters.

    Raises:
        ValueError: `key` is not a typed key, the model lacks the multipliers of the
            parameterisation, the mesh has other axes, or a parameter does not divide by it.
    """
    if parameterization and parameterization.model.multipliers != model.multipliers:
        raise ValueError(
            "model.multipliers are not those that its parameterisation fills in, and the forward"
            " pass would go without them: use the model that the parameterisation returns"
            " (parameterization.model) everywhere"
        )
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError("init_params needs a typed key: jax.random.key(seed), not PRNGKey(seed)")
    table = parameter_table(model, parameterization, rules)

    def build(key: Array) -> dict[str, Any]:
        return table.tree(lambda row: row.initial_value(key, dtype))

    if mesh is None:
        with without_mesh():
            return jax.jit(build)(key)
    if not is_our_mesh(mesh.axis_names):
        raise ValueError(
            f"init_params lays parameters out on a mesh of sharding.make_mesh (axes"
            f" {', '.join(MESH_AXES)}), not on axes {', '.join(mesh.axis_names)}: leave mesh out"
            " and place the parameters with jax.device_put"
        )
    table.check_divides(rules, dict(mesh.shape))
    shardings = named_shardings(table.tree(lambda row: row.spec), mesh)
    return jax.jit(build, out_shardings=shardings)(key)


def lay_out(model: ModelConfig, params: Any, *, rules: LogicalAxisRules) -> Any:
    """Parameters, or anything of their structure and shapes, laid out by these rules.

    Args:
        model: of the parameters.
        params: a nested dict of arrays.
        rules: on the axes of the current mesh; without an Explicit one nothing moves.
    """
    axes = parameter_table(model).tree(lambda row: row.declaration.axes)
    return jax.tree.map(Placement(rules).place, params, axes)
