# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Holds the weights of each layer in arrays of their own, so that a step reads them in place.

    held = apart(model, params)        {"moe_blocks_0": (layer 0, layer 1, ...), "embedding": ...}
    params = stacked(held)             in the compiled step, whose loop over layers is unrolled

A loop over stacked weights [L ...] slices those of a layer before it multiplies by them: on a CPU,
and before a kernel, that copies all experts of the layer for a few tokens. In an unrolled loop the
slice of a stack is one of the arrays that were stacked, and the compiler moves nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.models.config import ModelConfig


def num_calls(model: ModelConfig) -> int:
    """Return the layers that a token passes through, which an unrolled step has one by one.

    Args:
        model: Layers.
    """
    return sum(stack.num_calls for stack in model.stacks)


def longest_loop(model: ModelConfig) -> int:
    """Return the iterations of the longest loop over layers.

    Args:
        model: Layers.
    """
    return max(scan.length for scan in model.scans)


def apart(model: ModelConfig, params: Any) -> Any:
    """Return the parameters with a tuple of the layers in place of each stack of them.

    Layers of arrays on devices are copies, those of NumPy arrays are views; parameters that are
    apart already are returned as they are.

    Args:
        model: Layers.
        params: Parameters of either form, on the host, on one device or laid out on the current
            mesh.
    """

    def slice_of(leaf: Any, number: int) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf[number]
        return jax.lax.index_in_dim(leaf, number, keepdims=False)

    def layers(stack: Any, length: int) -> tuple[Any, ...]:
        if isinstance(stack, tuple):
            return stack
        return tuple(
            jax.tree.map(lambda leaf, n=number: slice_of(leaf, n), stack)
            for number in range(length)
        )

    return {**params, **{s.name: layers(params[s.name], s.length) for s in model.scans}}


def stack_layers(params: Any) -> Any:
    """Return the parameters with stacks of layers; undoes `apart`.

    Args:
        params: Parameters of either form.
    """

    def stack(layers: Any) -> Any:
        if not isinstance(layers, tuple):
            return layers
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    return {name: stack(layers) for name, layers in params.items()}
