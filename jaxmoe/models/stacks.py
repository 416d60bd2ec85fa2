# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Groups the layers of a model into scans, and names the paths of their parameters.

    equal layers             one scan over layers             moe_blocks_0, dense_blocks_0, ...
    a repeating period       one scan over its repeats        cycle_0/0, cycle_0/1, ...

The number in a name is that of the first layer. Periods are looked for only in models with
`ModelConfig.layers`: without it, alternating `dense_layers` keep the names that checkpoints have.
"""

from __future__ import annotations

import dataclasses
import functools

from jaxmoe.layers.feed_forwards import FeedForwardBase
from jaxmoe.layers.mixers import MixerBase
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """The kind of a layer."""

    mixer: MixerBase
    """Config of the mixer."""
    feed_forward: FeedForwardBase
    """Config of the feed-forward."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStack:
    """Equal layers whose parameters are stacked under one path."""

    path: str
    """Names from the root of the parameters, joined by "/"."""
    kind: Layer
    """Mixer and feed-forward of the layers."""
    layers: range
    """Numbers of the layers."""
    moe_layers: range
    """Numbers among the MoE layers; empty for dense layers."""
    turns: int = 1
    """Times that the layers are called with the same parameters, see `jaxmoe.models.loop`."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def num_calls(self) -> int:
        """Layers that a token passes through: the number of layers times the turns."""
        return self.num_layers * self.turns


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer that a token passes through."""

    stack: LayerStack
    place: int
    """Number among the layers of the stack."""
    turn: int = 0
    """Number of the turn of a loop."""

    @property
    def layer(self) -> int:
        """Number of the layer in the model."""
        return self.stack.layers[self.place]

    @property
    def cache_layer(self) -> int:
        """Number among the layers of the stack's cache."""
        return self.turn * self.stack.num_layers + self.place

    @property
    def moe_layer(self) -> int:
        """Number among the MoE layers; meaningless in a dense layer."""
        moe = self.stack.moe_layers
        return moe[self.place] if moe else self.place

    @property
    def kind(self) -> str:
        """Mixer and feed-forward as text."""
        kind = self.stack.kind
        return f"{kind.mixer.module_name}, {kind.feed_forward.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """Consecutive layers that are computed in one loop."""

    name: str
    """Name of the loop's module, the first part of the paths of its parameters."""
    stacks: tuple[LayerStack, ...]
    """The stacks of one iteration: one of equal layers, or one for each layer of a period."""
    axis: str = ax.LAYERS
    """Logical axis of the iterations: `ax.LAYERS` for the first scan with the most layers, which
    pipelines cut into stages, `ax.OTHER_LAYERS` for others."""
    is_looped: bool = False
    """Whether the layers belong to the block of a loop."""

    @property
    def turns(self) -> int:
        """Times that the loop is executed, see `LayerStack.turns`."""
        return self.stacks[0].turns

    @property
    def length(self) -> int:
        """Number of iterations."""
        return self.stacks[0].num_layers

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.length * len(self.stacks)

    @property
    def is_cycle(self) -> bool:
        """Whether an iteration is a period of layers."""
        return len(self.stacks) > 1


@functools.lru_cache(maxsize=256)
def group_layers(
    kinds: tuple[Layer, ...], *, has_cycles: bool, looped: range = range(0), turns: int = 1
) -> tuple[Scan, ...]:
    """Return the scans of a model.

    Args:
        kinds: Kind of each layer, in order.
        has_cycles: Whether repeating periods become one scan.
        looped: Consecutive layers that are called several times; no scan has some of them and
            others.
        turns: How often they are called.
    """
    scans: list[Scan] = []
    start = num_moe = 0
    while start < len(kinds):
        is_looped = start in looped
        end = looped.stop if is_looped else looped.start if start < looped.start else len(kinds)
        run_kinds = kinds[start:end]
        period = _period(run_kinds) if has_cycles else 1
        repeats = _repeats(run_kinds, period)
        scan = _scan(kinds[start : start + period], start, repeats, num_moe)
        if is_looped:
            stacks = tuple(dataclasses.replace(stack, turns=turns) for stack in scan.stacks)
            scan = dataclasses.replace(scan, stacks=stacks, is_looped=True)
        scans.append(scan)
        num_moe += sum(len(stack.moe_layers) for stack in scan.stacks)
        start += period * repeats
    longest = max(scans, key=lambda scan: scan.num_layers)
    return tuple(
        scan if scan is longest else dataclasses.replace(scan, axis=ax.OTHER_LAYERS)
        for scan in scans
    )


def _period(kinds: tuple[Layer, ...]) -> int:
    """Return the length of the period at the start that covers the most layers; 1 if none."""
    best = 1
    covered = _repeats(kinds, 1)
    for period in range(2, len(kinds) // 2 + 1):
        repeats = _repeats(kinds, period)
        if repeats > 1 and period * repeats > covered:
            best = period
            covered = period * repeats
    return best


def _repeats(kinds: tuple[Layer, ...], period: int) -> int:
    """Return how often the first `period` layers follow one another from the start."""
    repeats = 1
    while kinds[repeats * period : (repeats + 1) * period] == kinds[:period]:
        repeats += 1
    return repeats


def _scan(kinds: tuple[Layer, ...], start: int, repeats: int, num_moe: int) -> Scan:
    """Return the scan of a period.

    Args:
        kinds: Layers of the period.
        start: Number of the first layer.
        repeats: Iterations.
        num_moe: MoE layers before it.
    """
    period = len(kinds)
    routed = [kind.feed_forward.is_routed for kind in kinds]
    step = sum(routed)
    name = f"{kinds[0].feed_forward.name}_blocks_{start}" if period == 1 else f"cycle_{start}"
    stacks = []
    for offset, kind in enumerate(kinds):
        first = num_moe + sum(routed[:offset])
        moe_layers = range(first, first + step * repeats, step) if routed[offset] else range(0)
        layers = range(start + offset, start + offset + period * repeats, period)
        path = name if period == 1 else f"{name}/{offset}"
        stacks.append(LayerStack(path, kind, layers, moe_layers))
    return Scan(name, tuple(stacks))
