# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Asks an adapter how its additions to the matrices of half a layer are mixed for each token.

An adapter with mixtures is `LayerContext.mixing`. Its parameters of a half lie beside those of the
layer, as `mixer:<name>` and `feed_forward:<name>`.
"""

from __future__ import annotations

import typing
from typing import Final, Protocol, runtime_checkable

from flax import struct
from jaxtyping import Array, Bool, Float, Key

from sharding.constrain import Placement
from sharding.products.mixtures import Mix

Losses = dict[str, Float[Array, ""]]
ADVANTAGE: Final = "pass_advantage"
"""Name of the array of `Batch.extra` by which an adapter with several passes trains its draws: see
`jaxmoe.training.repeated`."""


# Not checked at run time: tree functions also fill records with shapes and specs.
@typing.no_type_check
@struct.dataclass
class MixingInputs:
    """What the mixture of the tokens may depend on."""

    x: Float[Array, "B S D"]
    """Normed input of the half."""
    token_mask: Bool[Array, "B S"]
    """False for padding."""
    context: dict[str, Array]
    """Further [B S] arrays: `index`, the number of each token in the batch, and those of
    `Mixing.reads` that the batch has."""
    key: Key[Array, ""] | None
    """PRNG key of this half of the layer and step; None without noise."""


@runtime_checkable
class Mixing(Protocol):
    """Mixtures of low-rank additions: a config of `jaxmoe.adapters`."""

    reads: tuple[str, ...]
    """Names of arrays of `Batch.extra` that are passed on as context."""

    def mix(
        self, own: dict[str, Array], given: MixingInputs, placement: Placement, *, train: bool
    ) -> tuple[Mix | None, Losses]:
        """Return how additions are mixed, and weighted losses of one layer to add in training.

        Args:
            own: Parameters of this half, without a dimension of layers; empty where the adapter
                has no targets.
            given: Input of the half.
            placement: Layout rules.
            train: Whether the step is of training.
        """
        ...
