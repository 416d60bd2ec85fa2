# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA-Mixer: low-rank additions mixed by a router of the token.

    y = x W + alpha / r sum_i f_i (x A_i) B_i          f = softmax(h P), h the normed input
    loss = a n sum_i p_i g_i + lambda mean_t H(f_t)    p_i mean gate, g_i share of tokens whose
         + beta |theta - theta_0|^2                    largest gate is i; theta the factors

In training every token has all additions, at inference the `top_k` largest, whose gates are divided
by their sum. The paper prints the entropy term with a minus, which rewards flat gates, and argues
for sharp ones: `entropy_sign` chooses, and by default sharpens. The balance loss is 1 for uniform
gates, n times the paper's. Coefficients are choices of this library. The losses are means over the
tokens of a micro-batch, summed over layers and halves.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array, Bool, Float

from jaxmoe.adapters.factors import TRAINED
from jaxmoe.contrib.adapters.mixed import FactorTraits, Made, MixedAdapter
from jaxmoe.contrib.adapters.mixtures import Gates
from jaxmoe.declarations import Declaration
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.view import HalfInputs, Losses
from sharding import axes as ax
from sharding.constrain import Placement
from sharding.products.tensor_parallel import Product, along_stream

_STREAM = (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoraMixerConfig(MixedAdapter):
    """Low-rank additions mixed by a router of the token (LoRA-Mixer); all else is frozen."""

    name: ClassVar[str] = "lora_mixer"

    members: int = 8
    """Additions to each matrix."""
    alpha: float = 16.0
    """The mixture is multiplied with alpha / rank."""
    top_k: int = 3
    """Additions of a token at inference; in training it has all."""
    balance: float = 0.01
    """Coefficient of the balance loss, 1 for uniform gates."""
    entropy: float = 0.001
    """Coefficient of the mean entropy of the gates, nats."""
    entropy_sign: Literal["sharpen", "flatten"] = "sharpen"
    """Direction of the entropy loss: sharpen lowers the entropy; flatten raises it, as printed."""
    anchor: float = 0.0
    """Coefficient of the squared distance of all factors from their initial values, of which one
    copy is kept if it is above 0."""

    def check_fields(self) -> None:
        """Raise a ValueError for invalid values."""
        if not 1 <= self.top_k <= self.members:
            raise ValueError(
                f"adapter.top_k={self.top_k} must be at least 1 and at most"
                f" adapter.members={self.members}"
            )
        for field in ("balance", "entropy", "anchor"):
            if not 0.0 <= (value := getattr(self, field)) < math.inf:
                raise ValueError(f"adapter.{field}={value} must be at least 0")

    @property
    def factor_traits(self) -> FactorTraits:
        """Properties of the factors of all additions."""
        return FactorTraits(has_start=self.anchor > 0.0)

    def losses(self, params: Any, placement: Placement) -> Losses:
        """Return the loss of the distance from the initial factors; see `Adapter.losses`."""
        del placement
        if not self.factor_traits.has_start:
            return {}
        flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
        distance = jnp.float32(0.0)
        for path, value in flat.items():
            if path.endswith(":downs"):
                distance += _squares(value - flat[f"{path.removesuffix(':downs')}:start"])
            if path.endswith(":ups"):  # which are 0 at first
                distance += _squares(value)
        return {"adapter_anchor": self.anchor * distance}

    def half_parameters(self, width: int) -> Made:
        """Return the router P of half a layer."""
        router = Declaration(shape=(width, self.members), axes=(ax.EMBED, ax.RANK), role="adapter")
        return {"gates": (router, TRAINED)}

    def mix(
        self, params: dict[str, Array], half: HalfInputs, placement: Placement, *, train: bool
    ) -> tuple[Gates | None, Losses]:
        """Return the gates of the tokens, and in training their losses; see `MixedAdapter`."""
        if not params:
            return None, {}
        x = half.x.astype(jnp.float32)
        router = params["gates"].astype(jnp.float32)
        product = Product("bsd,dn->bsn", router, (None, None), _STREAM, jnp.float32)
        gates = jax.nn.softmax(along_stream(x, {"gates": product}, placement)["gates"])
        if train:
            return Gates(values=gates[:, :, None]), self.losses_of(gates, half.token_mask)

        def chosen(gates: Array, *, batch_axes: tuple[str, ...]) -> Array:
            del batch_axes
            return largest(gates, self.top_k)[:, :, None]

        region = placement.region(chosen, in_axes=(_STREAM,), out_axes=(*_STREAM[:2], None, None))
        return Gates(values=region(gates)), {}

    def losses_of(self, gates: Float[Array, "B S n"], token_mask: Bool[Array, "B S"]) -> Losses:
        """Return the weighted losses of the gates of half a layer.

        Args:
            gates: Gates of each token.
            token_mask: False for padding.
        """
        weights = token_mask.astype(jnp.float32)
        total = jnp.maximum(jnp.sum(weights), 1.0)
        first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), self.members, dtype=jnp.float32)
        mean = jnp.sum(weights[..., None] * gates, axis=(0, 1)) / total
        share = jnp.sum(weights[..., None] * first, axis=(0, 1)) / total
        logs = jnp.log(jnp.maximum(gates, jnp.float32(1e-20)))
        entropy = -jnp.sum(weights * jnp.sum(gates * logs, axis=-1)) / total
        sign = 1.0 if self.entropy_sign == "sharpen" else -1.0
        return {
            "adapter_balance": self.balance * self.members * jnp.sum(mean * share),
            "adapter_entropy": sign * self.entropy * entropy,
        }


def _squares(x: Array) -> Float[Array, ""]:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def largest(gates: Float[Array, "B S n"], top_k: int) -> Float[Array, "B S n"]:
    """Return the gates with zeros for all but the largest, divided by their sum.

    Args:
        gates: Gates of each token, which sum to 1.
        top_k: Number of gates that stay.
    """
    values, ids = jax.lax.top_k(gates, top_k)
    num_kept = jnp.sum(
        jax.nn.one_hot(ids, gates.shape[-1], dtype=gates.dtype) * values[..., None], axis=-2
    )
    return num_kept / jnp.sum(values, axis=-1, keepdims=True)
