# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gathers sharded parameters, for the layouts that do not leave it to each use.

`zero2` and `nested` gather all parameters once, before the first layer, and the layers use that
copy, which `nested` leaves split over the nearest devices. Gradients are taken of the sharded
parameters: the gradient of a layer's copy is scattered at once, so that no
device holds the whole gradients of more than one layer.

`hierarchical` gathers a layer's parameters across replicas once. The result, sharded within a
replica, has a checkpoint name that every remat policy saves (`SECONDARY`), so that the backward
pass gathers within a replica only (arXiv 2306.10209, hpZ).

Matrices are gathered in the compute dtype; routers and gains, which are used as stored, in theirs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxmoe.declarations import Declaration, Deferred
from jaxmoe.execution import ExecutionConfig
from sharding import axes as ax
from sharding.constrain import Placement, gather_along, place_like
from sharding.products.quantized import Packed

WHOLE: Final = "whole"
"""Collection of gathered parameters beside "params"."""
SECONDARY: Final = "secondary"
"""Checkpoint name of parameters gathered across replicas."""

Tree = dict[str, Any]


def gather_once(params: Tree, declarations: Tree, execution: ExecutionConfig) -> Tree:
    """Return all parameters, laid out by the rules of the copies.

    Args:
        params: Parameters as stored.
        declarations: Declaration of each parameter, from the parameter table.
        execution: Sharding rules and dtype of matrices.
    """
    rules = execution.state_layout.copies
    assert rules is not None  # asked for only where there are copies
    dtype = execution.precision.compute_dtype
    placement = Placement(rules)

    def gather(leaf: Array, declaration: Declaration) -> Array:
        return placement.place(declaration.as_used(leaf, dtype), declaration.axes)

    return jax.tree.map(gather, params, declarations)


def use_outside_layers(params: Tree, gathered: Tree, layers: Collection[str]) -> tuple[Tree, Tree]:
    """Return parameters with the gathered copies outside the layers, and the layers' copies.

    Args:
        params: Parameters as stored.
        gathered: Gathered parameters.
        layers: Names of the scans of layers, which use their copies themselves.
    """
    used = {
        name: params[name] if name in layers else use_copies(params[name], gathered[name])
        for name in params
    }
    return used, {name: gathered[name] for name in layers}


def use_copies(params: Tree, gathered: Tree) -> Tree:
    """Return gathered parameters whose gradients go to the parameters as stored.

    Args:
        params: Parameters as stored.
        gathered: The same, gathered.
    """
    return jax.tree.map(_use, jax.lax.stop_gradient(gathered), params)


def use_whole(block: type[nn.Module]) -> type[nn.Module]:
    """Return the block with parameters from collection WHOLE; their gradients go to "params"."""

    def view(variables: Tree) -> Tree:
        return {"params": jax.tree.map(_use, variables[WHOLE], variables["params"]), WHOLE: {}}

    return nn.map_variables(block, ["params", WHOLE], trans_in_fn=view)


def gather_across_replicas(block: type[nn.Module], dtype: Any) -> type[nn.Module]:
    """Return the block with parameters that are gathered across replicas where they are used.

    Args:
        block: Module class of a layer.
        dtype: Dtype of matrices in products.
    """

    def gather(leaf: Array | Packed, declaration: Declaration) -> Any:
        if isinstance(leaf, Packed):
            return jax.tree.map(lambda part: gather_along(part, ax.REPLICA), leaf)
        leaf = declaration.as_used(leaf, dtype)
        return checkpoint_name(gather_along(leaf, ax.REPLICA), SECONDARY)

    return nn.map_variables(
        block,
        "params",
        trans_in_fn=lambda variables: jax.tree.map(
            lambda leaf: Deferred(leaf, read=gather),
            variables,
            is_leaf=lambda node: isinstance(node, Packed),
        ),
    )


@jax.custom_vjp
def _use(gathered: Array, cut: Array) -> Array:
    """Return the gathered parameter, whose gradient goes to the sharded one."""
    del cut
    return gathered


def _use_forward(gathered: Array, cut: Array) -> tuple[Array, Array]:
    return gathered, cut


def _use_backward(cut: Array, gradient: Array) -> tuple[None, Array]:
    return None, place_like(gradient.astype(cut.dtype), cut)


_use.defvjp(_use_forward, _use_backward)
