# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention whose queries and latents are scaled by the widths that they come from.

    q = sqrt(D / Rq) c_q Wqb            c = sqrt(D / R) norm(x Wkva)

Rq and R are the widths of the latents of queries and keys. With initial values of one size these
products have variances that grow with Rq and R, and the factors even them out. A cache holds the
scaled latents.

Source: LongCat-Flash (arXiv 2509.01322, section 2.2).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.mixers.latent_attention import LatentAttention, LatentAttentionConfig


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaledLatentConfig(LatentAttentionConfig):
    """Latent attention whose queries and latents are scaled by their widths."""

    name: ClassVar[str] = "scaled_latent"

    def __post_init__(self):
        LatentAttentionConfig.__post_init__(self)
        if self.query_latent_dim is None:
            raise ValueError(
                "attention.query_latent_dim=None: the scale of queries is that of their latent; set"
                " it to a width, or take the attention latent"
            )


class ScaledLatentAttention(LatentAttention):
    """One layer of latent attention with scales."""

    def _into_latents(self, x: Float[Array, "B S D"]) -> tuple[Array, Array, Array, Array]:
        q, source, latent, rope_key = LatentAttention._into_latents(self, x)
        config = self.config
        assert config.query_latent_dim is not None  # the config checks it
        width = self.context.embed_dim
        q_scale = jnp.asarray((width / config.query_latent_dim) ** 0.5, q.dtype)
        scale = jnp.asarray((width / config.latent_dim) ** 0.5, latent.dtype)
        return q * q_scale, source, latent * scale, rope_key


ScaledLatentConfig.module = ScaledLatentAttention
