# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention whose values are narrower than its keys, and are scaled.

    v = s x Wv                  Hv features of a head, of which queries and keys have H
    y = concat_n(o_n) Wo        Hv features of a head

Caches, pages and rows that are cut over `seq` take one width: values are padded with zeros there,
and the features of the padding are left out of the output. A stack may differ from layer to layer
in its numbers of keys and values, its rotary base and its options (sinks in layers with a window).

Source: MiMo-V2-Flash (arXiv 2601.02780), as published for transformers.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import require_positive
from jaxmoe.layers.mixers.attention import Attended, Attention, AttentionConfig
from jaxmoe.layers.records import HeadArrays, LayerCache, LayerInputs, TokenInputs
from sharding.sequence_parallel import sequence_ranks


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NarrowValuesConfig(AttentionConfig):
    """Grouped-query attention whose values are narrower than its keys."""

    name: ClassVar[str] = "narrow_values"

    value_dim: int = 16
    """Width of one head's values (Hv), at most head_dim."""
    value_scale: float = 1.0
    """Factor of the values (s)."""

    def __post_init__(self):
        AttentionConfig.__post_init__(self)
        require_positive("attention", self, "value_dim", "value_scale")
        if self.value_dim > self.head_dim:
            raise ValueError(
                f"attention.value_dim={self.value_dim} must be at most"
                f" attention.head_dim={self.head_dim}: a cache has slots as wide as the keys"
            )


class NarrowAttention(Attention):
    """One layer of attention with values narrower than keys."""

    config: NarrowValuesConfig

    def attend(
        self,
        heads: HeadArrays,
        tokens: TokenInputs,
        cache: LayerCache | None,
        layer: LayerInputs | None,
        *,
        keeps_lse: bool = False,
    ) -> Attended:
        """Attend with values narrower than keys, padded where a cache or a ring holds them."""
        width = self.config.value_dim
        v = heads.v * jnp.asarray(self.config.value_scale, heads.v.dtype)
        if cache is not None or sequence_ranks(self.execution.placement) > 1:
            padding = self.config.head_dim - width
            v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, padding)))
        heads = heads._replace(v=v)
        attended = Attention.attend(self, heads, tokens, cache, layer, keeps_lse=keeps_lse)
        return attended._replace(out=attended.out[..., :width])


NarrowValuesConfig.module = NarrowAttention
