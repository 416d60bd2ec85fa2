# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What JetMoE adds to layers of experts and to norms.

    y = sum_k g_k expert_k(x) + b            a bias of the layer, whatever the experts of a token
    rms_of_layers                            norms of the halves of layers have an epsilon of their
                                             own, the norm after the last layer that of the model

Source: JetMoE (arXiv 2404.07413), as published for transformers.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import LayerContext, require_positive
from jaxmoe.layers.feed_forwards.moe.config import MoEConfig
from jaxmoe.layers.feed_forwards.moe.layer import MoELayer
from jaxmoe.layers.mixers.attention_parts import declare_vector
from jaxmoe.layers.norms import Norm, RmsNormConfig
from jaxmoe.layers.records import FeedForwardOutputs, RoutingInputs
from sharding import axes as ax


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BiasedMoEConfig(MoEConfig):
    """A Mixture-of-Experts feed-forward layer whose output has a bias."""

    name: ClassVar[str] = "biased_moe"

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool,
        name: str | None = None,
    ) -> BiasedMoELayer:
        """Return the module of one layer."""
        return BiasedMoELayer(self, context, execution, train, name=name)


class BiasedMoELayer(MoELayer):
    """A layer of experts with a bias."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S D"], routing: RoutingInputs
    ) -> tuple[Float[Array, "B S D"], FeedForwardOutputs]:
        """Route, compute, combine, and add the bias; see `MoELayer`."""
        y, outputs = MoELayer.__call__(self, x, routing)
        bias = declare_vector(self, "bias", y.shape[-1:], (ax.NORM,))
        return y + bias.astype(y.dtype)[None, None], outputs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerRmsNormConfig(RmsNormConfig):
    """RMSNorm with an epsilon of its own in the halves of layers."""

    name: ClassVar[str] = "rms_of_layers"

    layer_epsilon: float = 1e-6
    """Term added to the mean square in the norms of the halves of layers."""

    def __post_init__(self):
        require_positive("norm", self, "layer_epsilon")

    def build(self, dim: int, epsilon: float, *, name: str | None = None) -> Norm:
        """Return the module of one norm: a half's is known by its name, the last one has another.

        Args:
            dim: Features that are normalised.
            epsilon: Term added to the mean square after the last layer.
            name: Name among the parameters.
        """
        is_last = name is None or name == "final_norm"
        return Norm(dim, epsilon if is_last else self.layer_epsilon, self, name=name)
