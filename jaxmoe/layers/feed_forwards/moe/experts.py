# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The routed experts: E feed-forwards as stacked weights, applied to rows sorted by expert.

    y = g (act(x Wg + b_g, x Wu + b_u) Wd + b_d)          g: the gate of the row
    y = act(g x Wg, g x Wu) Wd                            where the gate scales the input

The weights are declared here and used inside the layer's region, where rows are local. A SwiGLU
without biases is one operation (`grouped_swiglu`); anything else is two grouped products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmoe.declarations import Declaration, as_factor, declare, declare_matrix
from jaxmoe.layers.feed_forwards.activations import ActivationBase, SwiGLUConfig
from jaxmoe.layers.feed_forwards.moe.config import MoEConfig
from pallas_kernels import QuantizedArray, grouped_matmul, grouped_swiglu
from pallas_kernels.backend import Implementation
from pallas_kernels.grouped_swiglu import (
    HIDDEN,
    Additions,
    LowRankFactors,
    RowIndices,
    adds_factors,
)
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
    "gate_up_bias": (ax.EXPERTS, None, ax.EXPERT_MLP),
    "down_bias": (ax.EXPERTS, None),
}
"""Logical axes of the weights where they are used, for dispatchers that spread experts."""
_BIASES: Final = ("gate_up_bias", "down_bias")
_SWIGLU: Final = SwiGLUConfig()


class Experts(nn.Module):
    """Declares the weights of E experts."""

    embed_dim: int
    moe: MoEConfig

    @nn.compact
    def __call__(self) -> dict[str, Weight]:
        """Return `gate_up [E D 2 F]` and `down [E F D]`, f32 or quantised, and f32 biases.

        Without a gate the first is [E D 1 F]. With biases there are `gate_up_bias [E 2 F]` and
        `down_bias [E D]`.
        """
        num_experts = self.moe.num_experts
        hidden = self.moe.expert_dim
        parts = self.moe.activation.num_projections
        gate_up = Declaration(
            shape=(num_experts, self.embed_dim, parts, hidden),
            axes=(ax.EXPERTS, ax.EXPERT_EMBED, ax.GATE_UP, ax.EXPERT_MLP),
            role="expert_in",
            matrix=((-3,), (-2, -1)),
        )
        down = Declaration(
            shape=(num_experts, hidden, self.embed_dim),
            axes=(ax.EXPERTS, ax.EXPERT_MLP, ax.EXPERT_EMBED),
            role="expert_out",
        )
        weights: dict[str, Weight] = {
            name: declare_matrix(self, name, declaration)
            for name, declaration in {"gate_up": gate_up, "down": down}.items()
        }
        if not self.moe.extras.has_expert_bias:
            return weights
        biases = {
            "gate_up_bias": ((num_experts, parts, hidden), (ax.EXPERTS, ax.GATE_UP, ax.EXPERT_MLP)),
            "down_bias": ((num_experts, self.embed_dim), (ax.EXPERTS, ax.NORM)),
        }
        for name, (shape, axes) in biases.items():
            declaration = Declaration(
                shape=shape, axes=axes, role="norm", matrix=None, init="zeros"
            )
            weights[name] = declare(self, name, declaration)
        return weights


def encoded_axes(
    axes: Mapping[str, tuple[str | None, ...]], product: EncodedProduct
) -> dict[str, Any]:
    """Return how the weights enter the region where they are multiplied in few bits.

    Args:
        axes: Logical axes of the weights where they are used.
        product: Product in few bits.
    """
    encode = partial(product.encode, is_stack=True)
    return {
        name: leaf_axes if name in _BIASES else Encoded(leaf_axes, encode)
        for name, leaf_axes in axes.items()
    }


def is_by_kernel(activation: ActivationBase, weights: Mapping[str, Any]) -> bool:
    """Return whether `grouped_swiglu` can compute experts with floating matrices.

    Args:
        activation: Activation of the experts.
        weights: Weights of the experts.
    """
    return activation.has_kernel and not any(name in weights for name in _BIASES)


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
    gates: Float[Array, " A"] | None = None,
    *,
    indices: RowIndices | None = None,
    activation: ActivationBase = _SWIGLU,
    scales_input: bool = False,
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
        indices: Tokens of the rows; `rows` are then tokens [T D], and the result is the sum of the
            outputs of each [T D].
        activation: Function of the projections.
        scales_input: Whether the gates act on the rows instead.
        implementation: Implementation of `grouped_swiglu`, or of `grouped_matmul` where activations
            are rounded or measured.
        activations: Dtype that rows are rounded to before a quantised weight; None for none.
        encoded: Product in few bits, in place of the others.
        expert_tensor: Mesh axes over which the hidden units of an expert are cut.
        gathers_width: Whether the weights were gathered along D.
    """
    if indices is not None and (scales_input or encoded or not _reads_tokens(weights, activation)):
        # Only one operation reads tokens: others get the rows.
        options: dict[str, Any] = {
            "activation": activation,
            "scales_input": scales_input,
            "implementation": implementation,
            "activations": activations,
            "encoded": encoded,
            "expert_tensor": expert_tensor,
            "gathers_width": gathers_width,
        }
        sorted_rows = indices.rows_of(rows)
        return indices.sums_of(apply_experts(weights, sorted_rows, group_sizes, gates, **options))
    biases = _RowBiases.of(weights, rows, group_sizes, expert_tensor)
    if gates is not None and (scales_input or biases.down is not None):
        has_group = jnp.arange(rows.shape[0]) < jnp.sum(group_sizes)
        gates = jnp.where(has_group, gates, jnp.zeros_like(gates))
    if gates is not None and scales_input:
        rows = _scale(rows, gates)
        gates = None
    if encoded is not None:
        first, second = _encoded_matrices(weights, rows.dtype, encoded, expert_tensor)
        z = checkpoint_name(encoded.project_groups(rows, first, group_sizes), HIDDEN)  # R, 2, F
        hidden = biases.activate([z[:, i] for i in range(z.shape[1])], activation, gates)
        return biases.add(encoded.project_groups(hidden, second, group_sizes), gates)
    parts: Any = tuple(as_factor(weights[name], rows.dtype) for name in _inputs(weights))
    gate_up = parts if len(parts) == 2 else parts[0]
    down: Any = as_factor(weights["down"], rows.dtype)
    is_fused = _are_taken(gate_up, down, activations, implementation)
    if is_fused and is_by_kernel(activation, weights):
        return grouped_swiglu(
            rows,
            _without_addition(gate_up),
            _without_addition(down),
            group_sizes,
            gates,
            indices=indices,
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
    if len(hidden) == 1:
        hidden = jnp.split(hidden[0], activation.num_projections, axis=-1)
    return biases.add(multiply(biases.activate(hidden, activation, gates), down), gates)


def _reads_tokens(weights: Mapping[str, Any], activation: ActivationBase) -> bool:
    """Return whether `grouped_swiglu` computes all of the experts, with floating matrices."""
    are_floating = all(isinstance(weight, jax.Array) for weight in weights.values())
    return are_floating and is_by_kernel(activation, weights)


def _are_taken(
    gate_up: Any,
    down: Any,
    activations: QuantizedDtype | None,
    implementation: Implementation | None,
) -> bool:
    """Return whether `grouped_swiglu` multiplies with both matrices."""
    if any(isinstance(weight, LowRank) for weight in (gate_up, down)):
        return all(map(_is_added_here, (gate_up, down))) and adds_factors(implementation)
    is_floating = isinstance(gate_up, QuantizedArray) and activations is None
    return is_floating or not isinstance(gate_up, Packed)


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


class _RowBiases(NamedTuple):
    """The biases of each row, in the dtype of the rows; None without."""

    gate_up: Float[Array, "R 2 F"] | None = None
    down: Float[Array, "R D"] | None = None

    @classmethod
    def of(
        cls,
        weights: Mapping[str, Any],
        rows: Float[Array, "R D"],
        group_sizes: Int[Array, " e"],
        expert_tensor: tuple[str, ...],
    ) -> _RowBiases:
        """Return the biases of the expert of each row, 0 past the groups.

        Devices that share an expert add their outputs up, so one of them adds the second bias.
        """
        if "down_bias" not in weights:
            return cls()
        places = jnp.arange(rows.shape[0], dtype=group_sizes.dtype)
        ends = jnp.cumsum(group_sizes)
        experts = jnp.searchsorted(ends, places, side="right", method="compare_all")
        down = weights["down_bias"]
        if expert_tensor:
            is_adding = jax.lax.axis_index(expert_tensor) == 0
            down = jnp.where(is_adding, down, jnp.zeros_like(down))
        return cls(
            *(
                bias.astype(rows.dtype).at[experts].get(mode="fill", fill_value=0)
                for bias in (weights["gate_up_bias"], down)
            )
        )

    def activate(
        self,
        projections: Sequence[Float[Array, "R F"]],
        activation: ActivationBase,
        gates: Float[Array, " R"] | None,
    ) -> Float[Array, "R F"]:
        """Return the hidden units, times the gates of their rows."""
        if self.gate_up is not None:
            pairs = enumerate(projections)
            projections = [projection + self.gate_up[:, i] for i, projection in pairs]
        hidden = activation(projections.__getitem__)
        return hidden if gates is None else _scale(hidden, gates)

    def add(self, y: Float[Array, "R D"], gates: Float[Array, " R"] | None) -> Float[Array, "R D"]:
        """Return the outputs with the second bias, times the gates of their rows."""
        if self.down is None:
            return y
        return y + (self.down if gates is None else _scale(self.down, gates))


def _scale(rows: Float[Array, "R n"], gates: Float[Array, " R"]) -> Float[Array, "R n"]:
    """Return the rows times their gates, in their dtype."""
    return (rows.astype(jnp.float32) * gates[:, None]).astype(rows.dtype)


def _inputs(weights: Mapping[str, Any]) -> tuple[str, ...]:
    return ("gate", "up") if "gate" in weights else ("gate_up",)


def _encoded_matrices(
    weights: Mapping[str, Any],
    dtype: Any,
    product: EncodedProduct,
    expert_tensor: tuple[str, ...],
) -> tuple[Any, ...]:
    """Return both matrices encoded for products in few bits, `gate_up` before `down`."""
    return tuple(
        product.encode(weight.astype(dtype), (), ((), expert_tensor), is_stack=True)
        if isinstance(weight, jax.Array)
        else weight
        for weight in (weights["gate_up"], weights["down"])
    )
