# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts the rows of every device into two halves for the layers (TokenWeave, arXiv 2505.11329).

Half h holds rows h, h + 2, ... of the batch: whole sequences, half of those of each device.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block, sum_losses
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.observer import unite
from jaxmoe.layers.records import LayerInputs, LayerOutputs, Stream, TokenInputs
from jaxmoe.layers.rows import ExecutionRows
from jaxmoe.layers.view import Losses
from sharding import axes as ax
from sharding.constrain import Placement

LEAST_TOKENS: Final = 1024
"""Fewest tokens of one device: products of fewer rows leave its units idle. Not measured here."""


class HalvedBlock(Block):
    """One layer on two halves of the rows of a device, alternately (arXiv 2505.11329).

    No half waits for the other, so that collectives of the one can run beside products of the
    other.
    """

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        streams: tuple[Stream, Stream],
        layer: LayerInputs,
        tokens: tuple[TokenInputs, TokenInputs],
    ) -> tuple[tuple[Stream, Stream], LayerOutputs]:
        """Compute both halves of the layer for each half of the rows; no caches.

        Args:
            streams: Residual stream of each half of the rows.
            layer: Inputs of this layer.
            tokens: Inputs of all layers for each half.
        """
        # The compiler must not compute both halves in one product.
        begun: Any = jax.lax.optimization_barrier(streams)
        mixed = [
            self.mix(stream, layer, about) for stream, about in zip(begun, tokens, strict=True)
        ]
        fed = [
            self.feed(stream, layer, about)
            for (stream, _), about in zip(mixed, tokens, strict=True)
        ]
        after = (fed[0][0], fed[1][0])
        first = fed[0][1]
        second = fed[1][1]
        statistics = first.statistics
        observations = None
        if statistics is not None and second.statistics is not None:
            statistics = statistics + second.statistics
        for (_, mix), (_, feed) in zip(mixed, fed, strict=True):
            both = unite(mix.observations, feed.observations)
            if both is not None:
                observations = both if observations is None else observations + both
        outputs = LayerOutputs(
            statistics=statistics,
            losses=_halved_losses(mixed, fed),
            observations=observations,
        )
        return after, outputs


def _halved_losses(mixed: list[Any], fed: list[Any]) -> Losses:
    """Return the means over both halves of the rows; those of weights are equal in both."""
    first, second = (
        sum_losses(mix.losses, feed.losses) for (_, mix), (_, feed) in zip(mixed, fed, strict=True)
    )
    return {name: 0.5 * (value + second[name]) for name, value in first.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HalvesConfig(ExecutionRows):
    """Two halves of a device's rows that pass through a layer alternately (TokenWeave)."""

    name: ClassVar[str] = "halves"
    rearranges_rows: ClassVar[bool] = True

    def enter(
        self,
        stream: Stream,
        tokens: TokenInputs,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        has_cache: bool = False,
    ) -> tuple[tuple[Stream, Stream], tuple[TokenInputs, TokenInputs]]:
        """Return the stream and the inputs of all layers, each as two halves."""
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        shape = tokens.token_mask.shape
        check_halves(context, execution, shape, sizes, has_cache=has_cache)
        return split(stream, execution.placement), split(tokens, execution.placement)

    def layer(self, block: type[nn.Module], scan: str) -> type[nn.Module]:
        """Return the layer that computes both halves alternately."""
        del scan
        assert block is Block
        return HalvedBlock

    def leave(
        self, stream: tuple[Stream, Stream], context: LayerContext, execution: ExecutionConfig
    ) -> Stream:
        """Return the stream of all rows after the last layer."""
        del context
        return join(*stream, execution.placement)


def check_halves(
    context: LayerContext,
    execution: ExecutionConfig,
    shape: tuple[int, ...],
    sizes: dict[str, int],
    *,
    has_cache: bool,
) -> None:
    """Refuse rows that cannot be halved, or whose halves compute something else.

    Args:
        context: Mixers and feed-forwards.
        execution: With two halves.
        shape: Sequences and tokens of each, over all devices.
        sizes: Size of each axis of the current mesh.
        has_cache: Whether caches of earlier tokens are given.

    Raises:
        ValueError: A device has an odd number of sequences or too few tokens, or a router or
            capacity compares the tokens of a batch.
    """

    def devices(axis: str) -> int:
        return math.prod(sizes.get(name, 1) for name in execution.axis_rules.mesh_axes(axis))

    if has_cache:
        raise ValueError(
            "execution.halves=2 computes whole sequences, and a cache was given: decode with"
            " execution.halves 1"
        )
    number, length = shape
    shards = devices(ax.ACT_BATCH)
    if number % (2 * shards):
        raise ValueError(
            f"execution.halves=2 cuts the sequences of each device in two: {number} sequences on"
            f" {shards} devices must be divisible by {2 * shards}: change training.batch_size or"
            " training.accumulation, or set execution.halves to 1"
        )
    tokens = number // shards * length // devices(ax.ACT_SEQ_INNER)
    if tokens < LEAST_TOKENS:
        raise ValueError(
            f"the {tokens} tokens of a micro-batch on each device must be at least"
            f" {LEAST_TOKENS} with execution.halves=2: raise training.batch_size or"
            " training.sequence_length, lower training.accumulation, or set execution.halves to 1"
        )


def split(tree: Any, placement: Placement) -> tuple[Any, Any]:
    """Return the two halves of the rows of all arrays [B S ...]; other arrays are in both."""

    def halves(leaf: Array) -> Array:
        pairs = leaf.reshape(leaf.shape[0] // 2, 2, *leaf.shape[1:])
        rest = (ax.ACT_SEQ,) + (None,) * (leaf.ndim - 2)
        return placement.place(pairs, (ax.ACT_BATCH, None, *rest))

    leaves, structure = jax.tree.flatten(tree)
    cut = [
        (leaf, leaf) if leaf.ndim < 2 else tuple(jnp.moveaxis(halves(leaf), 1, 0))
        for leaf in leaves
    ]
    first, second = (structure.unflatten(pair[half] for pair in cut) for half in (0, 1))
    return first, second


def join(first: Any, second: Any, placement: Placement) -> Any:
    """Return the rows of two halves in their order."""

    def join_halves(one: Array, other: Array) -> Array:
        pairs = jnp.stack([one, other], axis=1)
        rows = pairs.reshape(-1, *one.shape[1:])
        return placement.place(rows, (ax.ACT_BATCH, ax.ACT_SEQ) + (None,) * (rows.ndim - 2))

    return jax.tree.map(join_halves, first, second)
