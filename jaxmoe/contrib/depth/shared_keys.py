# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention that shares keys and values across layers, at random in training.

    k_l, v_l = own, if the layer leads; else k, v of the last layer that led

The first layer of a stack leads. In training each other layer leads with probability p in each
step, so that the distance to its leader is geometric. Otherwise every n-th layer leads, and the
cache holds keys and values of these layers only. A layer that does not lead writes those of its
leader once more: the same values at the same place.

Reading: p is the probability of a layer's own keys; sources differ on what it denotes.
Keys and values of layers that do not lead are computed and not used.

Source: stochastic KV routing, arXiv 2604.22782.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.carry import CarriedArray
from jaxmoe.layers.context import LayerContext, MixerBase, require_positive
from jaxmoe.layers.mixers.attention import Attended, Attention, AttentionConfig
from jaxmoe.layers.records import HeadArrays, LayerCache, LayerInputs, TokenInputs
from jaxmoe.precision import PrecisionPolicy
from sharding import axes as ax
from sharding.sequence_parallel import KVCache, PagedCache

_STREAM_OF_KEYS = 0x6B  # separates its draws from those of routers


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SharedKeysConfig(AttentionConfig):
    """Grouped-query attention that takes keys and values of earlier layers."""

    name: ClassVar[str] = "shared_keys"
    has_pages: ClassVar[bool] = False
    can_select_pages: ClassVar[bool] = False

    leader_every: int = 2
    """Layers from one that computes keys and values to the next, outside of training."""
    own_probability: float | None = 0.5
    """Probability that a layer computes its own in a training step; None: every leader_every-th
    layer does in training too."""

    def __post_init__(self):
        AttentionConfig.__post_init__(self)
        require_positive("attention", self, "leader_every")
        if self.own_probability is not None and not 0.0 <= self.own_probability <= 1.0:
            raise ValueError(
                f"attention.own_probability={self.own_probability} must be between 0 and 1, or None"
            )

    def leads(self, layer: LayerInputs, *, train: bool) -> Bool[Array, ""]:
        """Return whether a layer computes its own keys and values.

        Args:
            layer: Number in its stack, and key of the step.
            train: Whether it is drawn.

        Raises:
            ValueError: It is to be drawn without a key.
        """
        if not train or self.own_probability is None:
            return layer.stack_layer % jnp.int32(self.leader_every) == 0
        if layer.key is None:
            raise ValueError(
                "attention.own_probability draws the layers with keys of their own in training, and"
                " no key was given: pass key=, or set own_probability to None"
            )
        key = jax.random.fold_in(layer.key, _STREAM_OF_KEYS)
        return jax.random.bernoulli(key, self.own_probability) | (layer.stack_layer == 0)

    def carries(self, context: LayerContext, execution: ExecutionConfig) -> dict[str, CarriedArray]:
        """Return the keys and values of the last layer that computed some."""
        del context, execution
        array = CarriedArray(
            features=(self.num_kv_heads, self.head_dim),
            axes=(ax.ACT_KV_HEADS, None),
            positions=ax.ACT_SEQ_INNER,
            dtype=None,
        )
        return {"keys": array, "values": array}

    def check_layers(
        self, mixers: Sequence[MixerBase], periods: Callable[[], Sequence[Sequence[MixerBase]]]
    ) -> None:
        """Refuse layers between which keys and values cannot be shared."""
        number = sum(mixer.name == self.name for mixer in mixers)
        if number > 1:
            raise ValueError(
                f"model.layers has {number} mixers {self.name} that differ, and keys of"
                " one do not fit another: make them equal"
            )
        if any(list(period).count(self) > 1 for period in periods()):
            raise ValueError(
                f"model.layers repeats a period with several layers of {self.name}, and"
                " each place of a period has a cache of its own: have one in the period, or"
                " equal layers throughout"
            )

    def cache_bytes_per_token(self, precision: PrecisionPolicy, *, layers: int) -> int:
        """Return the bytes that a cache holds of one token of one sequence."""
        leaders = self._leaders(layers)
        return AttentionConfig.cache_bytes_per_token(self, precision, layers=leaders)

    def initial_cache(
        self, execution: ExecutionConfig, *, layers: int, batch: int, slots: int
    ) -> KVCache | PagedCache:
        """Return an empty cache of the layers that lead."""
        given: dict[str, Any] = {"batch": batch, "slots": slots}
        return AttentionConfig.initial_cache(self, execution, layers=self._leaders(layers), **given)

    def _leaders(self, layers: int) -> int:
        return -(-layers // self.leader_every)

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool = False,
        name: str | None = None,
    ) -> SharedAttention:
        """Return the module of one layer."""
        return SharedAttention(self, context, execution, train, name=name)


class SharedAttention(Attention):
    """One layer of attention, to its own keys and values or to those of a layer before it."""

    config: SharedKeysConfig
    train: bool = False

    def attend(
        self,
        heads: HeadArrays,
        tokens: TokenInputs,
        cache: LayerCache | None,
        layer: LayerInputs | None,
        *,
        keeps_lse: bool = False,
    ) -> Attended:
        """Attend to the keys and values of the leader, and hand them on."""
        assert layer is not None  # a block gives it to every mixer
        is_leader = self.config.leads(layer, train=self.train)
        k = jnp.where(is_leader, heads.k, layer.carry["keys"])
        v = jnp.where(is_leader, heads.v, layer.carry["values"])
        if cache is not None:
            leader = cache.layer // jnp.int32(self.config.leader_every)
            cache = dataclasses.replace(cache, layer=leader)
        heads = HeadArrays(heads.q, k, v)
        attended = Attention.attend(self, heads, tokens, cache, layer, keeps_lse=keeps_lse)
        return attended._replace(carry={"keys": k, "values": v})
