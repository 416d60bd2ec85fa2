# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention: Gated DeltaNet with a decay for each row of the state.

    g   = -exp(a_log) softplus((u Wdecay_in) Wdecay_out + dt_bias)             [K] per head
    z   = (u Wgate_in) Wgate_out
    out = (RMSNorm of each head(y) sigmoid(z)) Wo

and all else as in `gated_delta.py`. Decays and gates pass through a narrow width, which no axis of
the mesh splits.
Sources: arXiv 2510.26692; layout: transformers' `KimiLinearDeltaAttention`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxmoe.contrib.linear_attention.gated_delta import Axes, GatedDelta, GatedDeltaConfig
from jaxmoe.declarations import Declaration
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import LayerContext, require_positive
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, along_stream, out_of_stream


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KimiDeltaConfig(GatedDeltaConfig):
    """Kimi Delta Attention: Gated DeltaNet with a decay for each row of the state."""

    name: ClassVar[str] = "kimi_delta"

    gate_rank: int = 32
    """Width through which decays and gates are computed (R); usually head_dim."""
    chunk: int = 16
    """Tokens that are multiplied together between two states; changes the speed only. Decays of
    all pairs of them are held, for each row of the states of a layer."""

    def __post_init__(self):
        GatedDeltaConfig.__post_init__(self)
        require_positive(self.name, self, "gate_rank")

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer.

        Args:
            embed_dim: D.
        """
        keys = 2 * self.num_key_heads * self.key_dim
        wide = embed_dim * (2 * self.inner_dim + keys + self.num_heads)
        narrow = 2 * embed_dim + self.num_heads * (self.key_dim + self.head_dim)
        return wide + self.gate_rank * narrow

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool = False,
        name: str | None = None,
    ) -> KimiDelta:
        """Return the module of one layer, which computes the same in training."""
        del train
        return KimiDelta(self, context, execution, name=name)


_NARROW = ("decay_in", "gate_in")


class KimiDelta(GatedDelta):
    """One layer of Kimi Delta Attention."""

    config: KimiDeltaConfig

    def project(self, x: Float[Array, "B S D"]) -> tuple[dict[str, Array], dict[str, Axes]]:
        """Return the projections of the stream by name, and their logical axes."""
        placement = self.execution.placement
        products = self.head_products()
        projected = out_of_stream(x, products, placement, form=self.execution.tensor_products)
        axes: dict[str, Axes] = {name: part.spread_axes for name, part in products.items()}
        narrow = {}
        for name in _NARROW:
            shape = (self.context.embed_dim, self.config.gate_rank)
            weight = self.matrix(name, shape, (ax.EMBED, ax.STATE), ((-2,), (-1,)))
            narrow[name] = Product("bsd,dr->bsr", weight.astype(x.dtype), (None, None), ())
        projected |= along_stream(x, narrow, placement)
        axes |= dict.fromkeys(narrow, (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None))
        return projected, axes

    def decay(self, projected: dict[str, Array], weights: dict[str, Array]) -> Float32[Array, ...]:
        """Return the logarithm of the decays of the heads of this device [B S N K]."""
        step = _widen(projected["decay_in"], weights["decay_out"])
        step = jax.nn.softplus(step + weights["dt_bias"][None, None])
        return -jnp.exp(weights["a_log"])[None, None, :, None] * step

    def gate(self, projected: dict[str, Array], weights: dict[str, Array]) -> Float32[Array, ...]:
        """Return the factors of the normed output of the heads of this device [B S N V]."""
        return jax.nn.sigmoid(_widen(projected["gate_in"], weights["gate_out"]))

    def vectors(self) -> dict[str, Declaration]:
        """Return the declarations of the parameters of heads and of the norm, and widening ones."""
        config = self.config
        rows = super().vectors()
        sizes = {"decay_out": config.key_dim, "gate_out": config.head_dim}
        for name, size in sizes.items():
            rows[name] = Declaration(
                shape=(config.gate_rank, config.num_heads, size),
                axes=(ax.STATE, ax.HEADS, ax.HEAD_DIM),
                role="attention_in",
                matrix=((-3,), (-2, -1)),
            )
        shape = (config.num_heads, config.key_dim)
        rows["dt_bias"] = dataclasses.replace(
            rows["dt_bias"], shape=shape, axes=(ax.HEADS, ax.HEAD_DIM)
        )
        return rows


def _widen(x: Float[Array, "B S R"], weight: Float[Array, "R N H"]) -> Float32[Array, "B S N H"]:
    """Return the product in f32 of operands in the dtype of x."""
    weight = weight.astype(x.dtype)
    return jnp.einsum("bsr,rnh->bsnh", x, weight, preferred_element_type=jnp.float32)
