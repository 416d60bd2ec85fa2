# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention: Gated DeltaNet with a decay for each row of the state.

    g   = -exp(a_log) softplus((u Wdecay_in) Wdecay_out + dt_bias)             [K] per head
    g   = floor sigmoid(exp(a_log) ((u Wdecay_in) Wdecay_out + dt_bias))       with a decay_floor
    z   = (u Wgate_in) Wgate_out
    out = (RMSNorm of each head(y) sigmoid(z)) Wo

and all else as in `gated_delta.py`. Decays and gates pass through a narrow width, which no axis of
the mesh splits; without a gate_rank they have a matrix each, u Wdecay and u Wz.
Sources: arXiv 2510.26692; layouts: transformers' `KimiLinearDeltaAttention` and, without a rank and
with a floor, `BailingHybridDeltaAttention` (Ling 3.0).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxmoe.contrib.linear_attention.gated_delta import Axes, GatedDelta, GatedDeltaConfig
from jaxmoe.declarations import Declaration
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import require_positive
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, along_stream, out_of_stream


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KimiDeltaConfig(GatedDeltaConfig):
    """Kimi Delta Attention: Gated DeltaNet with a decay for each row of the state."""

    name: ClassVar[str] = "kimi_delta"

    gate_rank: int | None = 32
    """Width through which decays and gates are computed (R), usually head_dim; None: they are
    products of the input itself."""
    decay_floor: float | None = None
    """Least logarithm of a decay, below 0, which bounds a sigmoid; None: there is no least one, and
    it is a softplus."""
    chunk: int = 16
    """Tokens that are multiplied together between two states; changes the speed only. Decays of
    all pairs of them are held, for each row of the states of a layer."""

    def __post_init__(self):
        GatedDeltaConfig.__post_init__(self)
        if self.gate_rank is not None:
            require_positive(self.name, self, "gate_rank")
        if self.decay_floor is not None and self.decay_floor >= 0:
            raise ValueError(
                f"{self.name}.decay_floor={self.decay_floor} must be below 0, or None for none:"
                " states decay"
            )

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer."""
        keys = 2 * self.num_key_heads * self.key_dim
        wide = embed_dim * (2 * self.inner_dim + keys + self.num_heads)
        gates = self.num_heads * (self.key_dim + self.head_dim)
        if self.gate_rank is None:
            return wide + embed_dim * gates
        return wide + self.gate_rank * (2 * embed_dim + gates)


_NARROW = ("decay_in", "gate_in")


class KimiDelta(GatedDelta):
    """One layer of Kimi Delta Attention."""

    config: KimiDeltaConfig

    def project(self, x: Float[Array, "B S D"]) -> tuple[dict[str, Array], dict[str, Axes]]:
        """Return the projections of the stream by name, and their logical axes."""
        placement = self.execution.placement
        rank = self.config.gate_rank
        products = self.head_products() if rank is not None else self._wide_products(x.dtype)
        projected = out_of_stream(x, products, placement, form=self.execution.tensor_products)
        axes: dict[str, Axes] = {name: part.spread_axes for name, part in products.items()}
        if rank is None:
            return projected, axes
        narrow = {}
        for name in _NARROW:
            shape = (self.context.embed_dim, rank)
            weight = self.matrix(name, shape, (ax.EMBED, ax.STATE), ((-2,), (-1,)))
            narrow[name] = Product("bsd,dr->bsr", weight.astype(x.dtype), (None, None), ())
        projected |= along_stream(x, narrow, placement)
        axes |= dict.fromkeys(narrow, (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None))
        return projected, axes

    def _wide_products(self, dtype: Any) -> dict[str, Product]:
        """Return the products of all heads, decays and gates among them."""
        products = self.head_products("z")
        config = self.config
        shape = (self.context.embed_dim, config.num_heads, config.key_dim)
        axes = (ax.EMBED, ax.HEADS, ax.HEAD_DIM)
        weight = self.matrix("decay", shape, axes, ((-3,), (-2, -1)))
        spread = products["z"].spread_axes
        part = Product("bsd,dnh->bsnh", weight.astype(dtype), (None, ax.HEADS, None), spread)
        return products | {"decay": part}

    def decay(self, projected: dict[str, Array], weights: dict[str, Array]) -> Float32[Array, ...]:
        """Return the logarithm of the decays of the heads of this device [B S N K]."""
        if self.config.gate_rank is None:
            step = projected["decay"].astype(jnp.float32)
        else:
            step = _widen(projected["decay_in"], weights["decay_out"])
        step = step + weights["dt_bias"][None, None]
        rate = jnp.exp(weights["a_log"])[None, None, :, None]
        if self.config.decay_floor is None:
            return -rate * jax.nn.softplus(step)
        return jnp.float32(self.config.decay_floor) * jax.nn.sigmoid(rate * step)

    def gate(self, projected: dict[str, Array], weights: dict[str, Array]) -> Float32[Array, ...]:
        """Return the factors of the normed output of the heads of this device [B S N V]."""
        if self.config.gate_rank is None:
            return jax.nn.sigmoid(projected["z"].astype(jnp.float32))
        return jax.nn.sigmoid(_widen(projected["gate_in"], weights["gate_out"]))

    def vectors(self) -> dict[str, Declaration]:
        """Return the declarations of the parameters of heads and of the norm, and widening ones."""
        config = self.config
        rows = super().vectors()
        rank = config.gate_rank
        if rank is not None:
            for name, size in {"decay_out": config.key_dim, "gate_out": config.head_dim}.items():
                rows[name] = Declaration(
                    shape=(rank, config.num_heads, size),
                    axes=(ax.STATE, ax.HEADS, ax.HEAD_DIM),
                    role="attention_in",
                    matrix=((-3,), (-2, -1)),
                )
        shape = (config.num_heads, config.key_dim)
        rows["dt_bias"] = dataclasses.replace(
            rows["dt_bias"], shape=shape, axes=(ax.HEADS, ax.HEAD_DIM)
        )
        return rows


KimiDeltaConfig.module = KimiDelta


def _widen(x: Float[Array, "B S R"], weight: Float[Array, "R N H"]) -> Float32[Array, "B S N H"]:
    """Return the product in f32 of operands in the dtype of x."""
    weight = weight.astype(x.dtype)
    return jnp.einsum("bsr,rnh->bsnh", x, weight, preferred_element_type=jnp.float32)
