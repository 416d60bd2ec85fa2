# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The dense feed-forward: a SwiGLU (arXiv 2002.05202), or another activation.

    y = (silu(x Wg) * (x Wu)) Wd

The gate and up projections are one [D 2 F] array: one matrix to an optimiser, and F can be spread
over devices without splitting it from its partner. Without a gate the array is [D 1 F].
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.configs import check_choices
from jaxmoe.declarations import Declaration, Role, as_factor, declare_matrix
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import (
    FeedForwardSizes,
    LayerContext,
    UnroutedFeedForward,
    require_positive,
)
from jaxmoe.layers.feed_forwards.activations import ActivationBase, SwiGLUConfig
from jaxmoe.layers.records import FeedForwardOutputs
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, into_stream, out_of_stream


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig(UnroutedFeedForward):
    """A dense feed-forward, a SwiGLU by default."""

    name: ClassVar[str] = "dense"
    module: ClassVar[type[FeedForward]]
    """Class of the module of one layer."""
    module_name: ClassVar[str] = "feed_forward"
    width_fields: ClassVar[tuple[str, ...]] = ("hidden_dim",)

    hidden_dim: int = 512
    """Hidden units."""
    activation: ActivationBase = SwiGLUConfig()
    """Function of the projections."""

    def __post_init__(self):
        check_choices("dense", self)
        require_positive("dense", self, "hidden_dim")

    @property
    def sizes(self) -> FeedForwardSizes:
        """Sizes that plans read."""
        return FeedForwardSizes(
            dense_dim=self.hidden_dim, num_projections=self.activation.num_projections
        )

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool,
        name: str | None = None,
    ) -> FeedForward:
        """Return the module of one layer."""
        del train
        return self.module(
            context.embed_dim,
            self.hidden_dim,
            execution,
            activation=self.activation,
            name=name,
        )


class FeedForward(nn.Module):
    """A dense feed-forward; also the shared experts of a MoE layer."""

    embed_dim: int
    hidden_dim: int
    execution: ExecutionConfig
    role_in: Role = "mlp_in"
    role_out: Role = "mlp_out"
    activation: ActivationBase = SwiGLUConfig()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S D"], routing: Any = None
    ) -> tuple[Float[Array, "B S D"], FeedForwardOutputs]:
        """Compute the layer.

        Args:
            x: Normed input.
            routing: Read for `mix`; None where nothing is mixed.

        Returns:
            The output in the compute dtype, and an empty record.
        """
        mix = None if routing is None else routing.mix
        dtype = self.execution.precision.compute_dtype
        placement = self.execution.placement
        gate_up = Declaration(
            shape=(self.embed_dim, self.activation.num_projections, self.hidden_dim),
            axes=(ax.EMBED, ax.GATE_UP, ax.MLP),
            role=self.role_in,
            matrix=((-3,), (-2, -1)),
        )
        down = Declaration(
            shape=(self.hidden_dim, self.embed_dim), axes=(ax.MLP, ax.EMBED), role=self.role_out
        )
        wide = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None, ax.ACT_MLP)
        execution = self.execution
        options = {
            "activations": execution.precision.activations,
            "encoded": execution.encoded_product,
        }
        weight = as_factor(declare_matrix(self, "gate_up", gate_up), dtype, mix)
        product = Product("bsd,dcf->bscf", weight, (None, None, ax.MLP), wide, **options)
        form = execution.tensor_products
        hidden = out_of_stream(x.astype(dtype), {"hidden": product}, placement, form=form)["hidden"]
        hidden = self._activate(hidden)
        weight = as_factor(declare_matrix(self, "down", down), dtype, mix)
        wide = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_MLP)
        product = Product("bsf,fd->bsd", weight, (ax.MLP, None), wide, **options)
        return into_stream(hidden, product, placement, form=form), FeedForwardOutputs()

    def _activate(self, projected: Float[Array, "B S c F"]) -> Float[Array, "B S F"]:
        return self.activation(lambda part: projected[:, :, part])


DenseConfig.module = FeedForward
