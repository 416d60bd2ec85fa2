# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The routed experts: E SwiGLUs as stacked weights, applied to rows sorted by expert.

The weights are declared here and used inside the layer's region, where rows are local.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmoe.declarations import Declaration, as_factor, declare_matrix
from pallas_kernels import QuantizedArray, grouped_matmul, grouped_swiglu
from pallas_kernels.backend import Implementation
from pallas_kernels.grouped_swiglu import HIDDEN, Additions, LowRankFactors, adds_factors
from pallas_kernels.quantized_array import QuantizedDtype
from sharding import axes as ax
from sharding.constrain import Encoded
from sharding.products.encoded import EncodedProduct
from sharding.products.low_rank import LowRank
from sharding.products.quantized import Packed, Weight, quantized_groups

WEIGHT_AXES = {
    "gate_up": (ax.EXPERTS, None, None, ax.EXPERT_MLP),
    "gate": (ax.EXPERTS, None, ax.EXPERT_MLP),
    "up": (ax.EXPERTS, None, ax.EXPERT_MLP),
    "down": (ax.EXPERTS, ax.EXPERT_MLP, None),
}
"""Logical axes of the weights where they are used, for dispatchers that spread experts."""


class Experts(nn.Module):
    """Declares the weights of E experts."""

    embed_dim: int
    num_experts: int
    expert_dim: int

    @nn.compact
    def __call__(self) -> dict[str, Weight]:
        """Return `gate_up [E D 2 F]` and `down [E F D]`, f32 or quantised."""
        num_experts = self.num_experts
        hidden = self.expert_dim
        gate_up = Declaration(
            shape=(num_experts, self.embed_dim, 2, hidden),
            axes=(ax.EXPERTS, ax.EXPERT_EMBED, ax.GATE_UP, ax.EXPERT_MLP),
            role="expert_in",
            matrix=((-3,), (-2, -1)),
        )
        down = Declaration(
            shape=(num_experts, hidden, self.embed_dim),
            axes=(ax.EXPERTS, ax.EXPERT_MLP, ax.EXPERT_EMBED),
            role="expert_out",
        )
        return {
            name: declare_matrix(self, name, declaration)
            for name, declaration in {"gate_up": gate_up, "down": down}.items()
        }


def encoded_axes(
    axes: Mapping[str, tuple[str | None, ...]], product: EncodedProduct
) -> dict[str, Encoded]:
    """Return how the weights enter the region where they are multiplied in few bits.

    Args:
        axes: Logical axes of the weights where they are used.
        product: Product in few bits.
    """
    encode = partial(product.encode, is_stack=True)
    return {name: Encoded(leaf_axes, encode) for name, leaf_axes in axes.items()}


def in_halves(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights with `gate [E D F]` and `up [E D F]` for `gate_up`, unless quantised.

    Each is gathered, and its gradient reduced, on its own: buffers are half as large.

    Args:
        weights: `gate_up [E D 2 F]` and `down`.
    """
    gate_up = weights["gate_up"]
    if not isinstance(gate_up, jax.Array):
        return dict(weights)
    return {"gate": gate_up[:, :, 0], "up": gate_up[:, :, 1], "down": weights["down"]}


def apply_experts(
    weights: Mapping[str, Any],
    rows: Float[Array, "R D"],
    group_sizes: Int[Array, " e"],
    gates: Float[Array, " R"] | None = None,
    *,
    implementation: Implementation | None = None,
    activations: QuantizedDtype | None = None,
    encoded: EncodedProduct | None = None,
    expert_tensor: tuple[str, ...] = (),
    gathers_width: bool = False,
) -> Float[Array, "R D"]:
    """Apply to each row its expert.

    Args:
        weights: Weights of the e experts held here, from `Experts`, `in_halves` or encoded.
        rows: Rows sorted by expert, in the compute dtype.
        group_sizes: Rows of each expert; rows past their sum give 0.
        gates: Factor of each row's output, f32, which acts on the hidden units; None for 1.
        implementation: Implementation of `grouped_swiglu`, or of `grouped_matmul` where activations
            are rounded or measured.
        activations: Dtype that rows are rounded to before a quantised weight; None for none.
        encoded: Product in few bits, in place of the others.
        expert_tensor: Mesh axes over which the hidden units of an expert are cut.
        gathers_width: Whether the weights were gathered along D.
    """
    if encoded is not None:
        return _in_few_bits(weights, rows, group_sizes, gates, encoded, expert_tensor)
    parts: Any = tuple(as_factor(weights[name], rows.dtype) for name in _inputs(weights))
    gate_up = parts if len(parts) == 2 else parts[0]
    down: Any = as_factor(weights["down"], rows.dtype)
    is_floating = isinstance(gate_up, QuantizedArray) and activations is None
    is_fused = is_floating or not isinstance(gate_up, Packed)
    if any(isinstance(weight, LowRank) for weight in (gate_up, down)):
        is_fused = all(map(_is_added_here, (gate_up, down))) and adds_factors(implementation)
    if is_fused:
        return grouped_swiglu(
            rows,
            _without_addition(gate_up),
            _without_addition(down),
            group_sizes,
            gates,
            down_is_turned=gathers_width,
            additions=Additions(_factors_of(gate_up), _factors_of(down)),
            implementation=implementation,
        )

    def multiply(rows: Array, weight: Any) -> Array:
        if isinstance(weight, LowRank):
            y = multiply(rows, weight.weight)
            return weight.added_to_groups(y, rows, group_sizes, implementation)
        if not isinstance(weight, Packed):
            matrix = weight.reshape(*weight.shape[:2], -1)
            return grouped_matmul(rows, matrix, group_sizes, implementation=implementation)
        return quantized_groups(
            rows, weight, group_sizes, activations=activations, implementation=implementation
        )

    hidden = [checkpoint_name(multiply(rows, part), HIDDEN) for part in parts]
    gate, up = hidden if len(hidden) == 2 else jnp.split(hidden[0], 2, axis=-1)
    return multiply(_activate(gate, up, gates), down)


def _is_added_here(weight: Any) -> bool:
    """Return whether `grouped_swiglu` can multiply with a matrix and its addition."""
    if isinstance(weight, LowRank):
        return weight.mix is None and isinstance(weight.weight, jax.Array)
    return isinstance(weight, jax.Array)


def _without_addition(weight: Any) -> Any:
    return weight.weight if isinstance(weight, LowRank) else weight


def _factors_of(weight: Any) -> LowRankFactors | None:
    """Return the addition to a matrix with flat inputs and outputs; None without one."""
    return (
        LowRankFactors(*weight.flat_factors, weight.scale) if isinstance(weight, LowRank) else None
    )


def _activate(
    gate: Float[Array, "R F"], up: Float[Array, "R F"], gates: Float[Array, " R"] | None
) -> Float[Array, "R F"]:
    """Return the hidden units, times the gates of their rows."""
    hidden = jax.nn.silu(gate) * up
    if gates is None:
        return hidden
    return (hidden.astype(jnp.float32) * gates[:, None]).astype(hidden.dtype)


def _inputs(weights: Mapping[str, Any]) -> tuple[str, ...]:
    return ("gate", "up") if "gate" in weights else ("gate_up",)


def _in_few_bits(
    weights: Mapping[str, Any],
    rows: Float[Array, "R D"],
    group_sizes: Int[Array, " e"],
    gates: Float[Array, " R"] | None,
    product: EncodedProduct,
    expert_tensor: tuple[str, ...],
) -> Float[Array, "R D"]:
    """Compute the products in few bits, the activation between them in the compute dtype."""
    gate_up, down = (
        product.encode(weight.astype(rows.dtype), (), ((), expert_tensor), is_stack=True)
        if isinstance(weight, jax.Array)
        else weight
        for weight in (weights["gate_up"], weights["down"])
    )
    hidden = checkpoint_name(product.project_groups(rows, gate_up, group_sizes), HIDDEN)  # R, 2, F
    hidden = _activate(hidden[:, 0], hidden[:, 1], gates)
    return product.project_groups(hidden, down, group_sizes)
