# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of a model that decide how long a step takes."""

from __future__ import annotations

import collections
import dataclasses

from jaxmoe.layers.mixers import MixerBase
from jaxmoe.models.config import ModelConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import parameter_table
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Parameters, bytes and FLOPs of one model."""

    num_layers: int
    embed_dim: int
    dense: int
    """Parameters that every token meets, without routed experts and head."""
    head: int
    """Parameters of the output projection, which tokens that draw meet."""
    expert: int = 0
    """Parameters of one expert of one layer."""
    num_experts: int = 0
    top_k: int = 0
    moe_layers: int = 0
    """Layers with routed experts."""
    kv_bytes: int = 0
    """Bytes of keys and values of one token in all layers."""
    pair_flops: float = 0.0
    """FLOPs of one query and one key in all layers: 4 N H each."""
    weight_bytes: int = 2
    """Bytes of a parameter."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.dense + self.head + self.moe_layers * self.num_experts * self.expert

    @classmethod
    def of(cls, model: ModelConfig) -> ModelSizes:
        """Return the numbers of a model in bfloat16.

        Args:
            model: Model; its routed experts must have one size.
        """
        rows = list(parameter_table(model))
        routed = sum(row.size for row in rows if ax.EXPERTS in row.declaration.axes)
        embedding = sum(row.size for row in rows if row.declaration.role == "embedding")
        vocabulary = sum(row.size for row in rows if ax.VOCAB in row.declaration.axes)
        head = vocabulary - embedding or embedding
        num_experts = model.moe.num_experts if model.moe is not None and routed else 0
        moe_layers = sum(kind.feed_forward == model.moe for kind in model.kinds)
        moe_layers = moe_layers if num_experts else 0
        mixers = collections.Counter(kind.mixer for kind in model.kinds)
        return cls(
            num_layers=model.num_layers,
            embed_dim=model.embed_dim,
            dense=sum(row.size for row in rows) - routed - vocabulary,
            head=head,
            expert=routed // (moe_layers * num_experts) if num_experts else 0,
            num_experts=num_experts,
            top_k=model.moe.top_k if model.moe is not None and num_experts else 0,
            moe_layers=moe_layers,
            kv_bytes=sum(_kv_bytes(mixer, layers) for mixer, layers in mixers.items()),
            pair_flops=sum(_pair_flops(kind.mixer) for kind in model.kinds),
        )

    def attending(self, mixer: MixerBase) -> ModelSizes:
        """Return the numbers with another kind of attention in all layers.

        Its projections are counted as those of the model.

        Args:
            mixer: Config of the attention.
        """
        return dataclasses.replace(
            self,
            kv_bytes=_kv_bytes(mixer, self.num_layers),
            pair_flops=self.num_layers * _pair_flops(mixer),
        )


def _kv_bytes(mixer: MixerBase, layers: int) -> int:
    """Return the bytes of keys and values of one token in some layers, in bfloat16."""
    return mixer.cache_bytes_per_token(PrecisionPolicy(compute="bfloat16"), layers=layers)


def _pair_flops(mixer: MixerBase) -> float:
    """Return the FLOPs of one more key in view of each query, forward; windows are not counted."""
    # Twice the length is half of it more keys in view on average, forward is a third of training.
    return max(mixer.flops_per_token(4) - mixer.flops_per_token(2), 0.0) / 3.0
