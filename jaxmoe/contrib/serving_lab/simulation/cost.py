# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Time of a step by the roofline: FLOPs, bytes and network of each operation.

With T tokens of a step, q new ones of a sequence behind c computed ones, K of E experts:

    projections   2 T P                             P b
    attention     sum of pairs of query and key     sum of (c + q) tokens of keys and values
    experts       2 T K X                           X b E_d,   E_d = sum over e of 1 - (1 - p_e)^T
    head          2 (drawn tokens) P_head           P_head b

P parameters that all tokens meet, X of one expert, b bytes of a parameter, p_e the probability
that a token chooses expert e (K / E where the loads are not known). An operation takes the longest
of FLOPs, bytes and network by their rates, a step the sum of them and a constant. In nano-batches
(NanoFlow, arXiv:2408.12757) compute, memory and network overlap over the whole step, and weights
are read once per nano-batch. A lane with share s of the device has s of its FLOP/s and, since a
part of the cores saturates the memory, s / 0.4 of its bandwidth at most all of it (0.4 is an
assumption). A chip takes idle + (peak - idle) u f^3 watts at a clock of f times the full one, which
scales its FLOP/s and not its bandwidth; u is the share of the FLOP/s or, if more, half the share of
the bandwidth that a step reaches (an assumption). Weights that do not fit into nine tenths of the
memory are read from host memory, beside the rest; pages have the last tenth (an assumption).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxmoe.contrib.serving_lab.simulation.sizes import ModelSizes
from jaxmoe.planning.hardware import Chip
from jaxmoe.serve.facts import WorkPart

SATURATION = 0.4
"""Share of the cores that saturates the memory."""

PAGES = 0.1
"""Share of the memory for pages where the weights do not fit."""

MEMORY_POWER = 0.5
"""Share of the power above idle that the memory takes at its full bandwidth."""


@dataclasses.dataclass(slots=True)
class CostedOperation:
    """Demands of one operation of a step."""

    flops: float
    weights: float
    """Bytes of weights read."""
    other: float = 0.0
    """Bytes of keys and values read."""
    network: float = 0.0
    """Bytes that each device sends."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step and what it read."""

    seconds: float
    expert_bytes: float
    flops: float
    watts: float = 0.0
    """Power above idle of all devices of the instance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Cost model of one instance; `jaxmoe.serve.facts.CostModel`."""

    sizes: ModelSizes
    chip: Chip
    num_chips: int = 1
    """Devices of the instance, along the tensor axis."""
    constant: float = 1e-4
    """Seconds of every step for launching it."""
    memory_efficiency: float = 0.8
    """Share of the memory bandwidth that is reached."""
    clock: float = 1.0
    """Clock as a share of the full one."""
    loads: tuple[tuple[float, ...], ...] = ()
    """Share of the assignments of each expert in each MoE layer; equal when empty."""

    def __post_init__(self) -> None:
        if self.num_chips < 1:
            raise ValueError(f"num_chips={self.num_chips} must be at least 1")
        if not 0 < self.clock <= 1:
            raise ValueError(f"clock={self.clock} must lie in (0, 1]")

    @functools.cached_property
    def weight_bytes(self) -> float:
        """Bytes of all parameters."""
        return float(self.sizes.total * self.sizes.weight_bytes)

    @functools.cached_property
    def _chosen(self) -> np.ndarray:
        """Probability [L E] that a token chooses an expert, where the loads are known."""
        return np.minimum(1.0, self.sizes.top_k * np.asarray(self.loads))

    @functools.cached_property
    def spill_share(self) -> float:
        """Share of the weights that does not fit into the devices, beside room for pages."""
        room = (1.0 - PAGES) * self.chip.available * self.num_chips
        return max(0.0, 1.0 - room / self.weight_bytes)

    def num_pages(self, page_size: int, share: float = 0.9) -> int:
        """Return the pages that fit beside the weights of the device, at least one.

        Args:
            page_size: Tokens of a page.
            share: Share of the remaining memory for pages.
        """
        resident = (1.0 - self.spill_share) * self.weight_bytes
        free_bytes = self.chip.available * self.num_chips - resident
        return max(int(share * free_bytes / (page_size * max(self.sizes.kv_bytes, 1))), 1)

    def seconds(
        self, parts: Sequence[WorkPart], *, share: float = 1.0, nano_batches: int = 1
    ) -> float:
        """Return the seconds of a step."""
        return self.cost(parts, share=share, nano_batches=nano_batches).seconds

    def cost(
        self, parts: Sequence[WorkPart], *, share: float = 1.0, nano_batches: int = 1
    ) -> StepCost:
        """Return seconds and bytes of a step.

        Args:
            parts: Work of each sequence.
            share: Share of the device.
            nano_batches: Parts into which the step is cut to overlap its resources.
        """
        experts = 0.0
        operations: list[CostedOperation] = []
        for operation, is_expert in self._operations(parts):
            operations.append(operation)
            experts += operation.weights * is_expert
        full = self.chip.flops * self.chip.efficiency * self.num_chips
        flops = full * self.clock * min(1.0, share)
        bandwidth = self.chip.memory_bandwidth * self.memory_efficiency * self.num_chips
        bandwidth *= min(1.0, share / SATURATION)
        host = self.chip.host_bandwidth * self.num_chips
        link = self.chip.link_bandwidth

        spill_share = self.spill_share

        def seconds(work: CostedOperation) -> float:
            return max(
                work.flops / flops,
                ((1.0 - spill_share) * work.weights + work.other) / bandwidth,
                spill_share * work.weights / host,
                work.network / link,
            )

        step = CostedOperation(
            sum([work.flops for work in operations]),
            nano_batches * sum([work.weights for work in operations]),
            sum([work.other for work in operations]),
            sum([work.network for work in operations]),
        )
        overlaps = nano_batches > 1
        total = seconds(step) if overlaps else sum([seconds(work) for work in operations])
        total += self.constant
        read = sum([nano_batches * work.weights + work.other for work in operations])
        return StepCost(
            total,
            experts * (1 if nano_batches == 1 else nano_batches),
            step.flops,
            self._watts(step.flops, read, total),
        )

    def demands(self, parts: Sequence[WorkPart]) -> tuple[float, float, float]:
        """Return the numbers that the rates are multiplied with: 1, FLOPs, bytes of memory.

        An operation counts in one of the two, by what takes longer on one device.

        Args:
            parts: Work of each sequence.
        """
        flops = 0.0
        moved = 0.0
        for operation, _ in self._operations(parts):
            read = operation.weights + operation.other
            arithmetic = operation.flops / (self.chip.flops * self.chip.efficiency)
            if arithmetic > read / (self.chip.memory_bandwidth * self.memory_efficiency):
                flops += operation.flops
            else:
                moved += read
        return 1.0, flops, moved

    @property
    def idle_watts(self) -> float:
        """Power of the instance when it waits."""
        return self.num_chips * self.chip.idle_watts

    def at_clock(self, clock: float) -> Roofline:
        """Return the costs at a share of the full clock."""
        return dataclasses.replace(self, clock=clock)

    def on_chips(self, num_chips: int) -> Roofline:
        """Return the costs of the instance on another number of devices."""
        return dataclasses.replace(self, num_chips=num_chips)

    def loading_seconds(self) -> float:
        """Return the seconds until the weights of an instance are read from host memory."""
        return self.weight_bytes / self.num_chips / self.chip.host_bandwidth

    def resharding_bytes(self, num_chips: int) -> float:
        """Return the bytes that the busiest device sends or receives for another number of devices.

        Each device holds an equal share of the weights, and keeps what it will hold again. New
        devices receive their share; what leaving ones held is sent to those that stay.

        Args:
            num_chips: Devices afterwards.
        """
        few, many = sorted((self.num_chips, num_chips))
        moved = self.weight_bytes * (many - few) / many
        return moved / min(few, many - few) if moved else 0.0

    def resharding_seconds(self, num_chips: int) -> float:
        """Return the seconds of a change to another number of devices: bytes / bandwidth."""
        return self.resharding_bytes(num_chips) / self.chip.link_bandwidth

    def _watts(self, step_flops: float, read: float, seconds: float) -> float:
        """Return the power above idle during a step.

        Args:
            step_flops: FLOPs of the step.
            read: Bytes that it reads.
            seconds: Its time.
        """
        chip = self.chip
        flops = chip.flops * chip.efficiency * self.num_chips * self.clock
        compute = step_flops / (flops * seconds)
        memory = read / (chip.memory_bandwidth * self.memory_efficiency * self.num_chips * seconds)
        busy = min(max(compute, MEMORY_POWER * memory), 1.0)
        return self.num_chips * (chip.peak_watts - chip.idle_watts) * busy * self.clock**3

    def distinct_experts(self, num_tokens: int) -> float:
        """Return the expected number of experts that some tokens choose, in the mean over layers.

        Args:
            num_tokens: T.
        """
        sizes = self.sizes
        if not self.loads:
            return sizes.num_experts * (1 - (1 - sizes.top_k / sizes.num_experts) ** num_tokens)
        missed = (1.0 - self._chosen) ** num_tokens
        return float((1.0 - missed).sum(axis=-1).mean())

    def _operations(self, parts: Sequence[WorkPart]) -> Iterator[tuple[CostedOperation, bool]]:
        """Yield the operations of a step, and whether they are those of the experts."""
        sizes = self.sizes
        last = self.sizes.num_layers
        inner = {border for part in parts if part.layers for border in part.layers}
        borders = sorted({0, last, *inner})
        if not inner and parts:
            yield from self._layers(parts, 1.0)
            borders = []
        for begin, end in itertools.pairwise(borders):
            in_layers = [
                part
                for part in parts
                if part.layers is None or part.layers[0] <= begin and end <= part.layers[1]
            ]
            if in_layers:
                yield from self._layers(in_layers, (end - begin) / last)
        drawn = len(parts)
        if inner:
            drawn = sum(part.layers is None or part.layers[1] == last for part in parts)
        yield (
            CostedOperation(2.0 * drawn * sizes.head, float(sizes.head * sizes.weight_bytes)),
            False,
        )

    def _layers(
        self, parts: Sequence[WorkPart], share: float
    ) -> Iterator[tuple[CostedOperation, bool]]:
        """Yield the operations of a share of the layers, through which the same tokens pass."""
        sizes = self.sizes
        b = self.sizes.weight_bytes
        tokens = 0
        num_tokens = 0
        pairs = 0.0
        for part in parts:
            count = part.count
            tokens += count
            num_tokens += count + part.context
            pairs += count * (part.context + count / 2)
        sent = 4 * tokens * sizes.embed_dim * b * sizes.num_layers
        sent *= (self.num_chips - 1) / self.num_chips  # two all-reduces of a layer, as rings
        yield (
            CostedOperation(
                2.0 * tokens * sizes.dense * share, sizes.dense * b * share, 0.0, sent * share
            ),
            False,
        )
        yield (
            CostedOperation(
                sizes.pair_flops * pairs * share, 0.0, sizes.kv_bytes * num_tokens * share
            ),
            False,
        )
        if sizes.num_experts:
            layers = sizes.moe_layers * share * sizes.expert
            read = layers * b * self.distinct_experts(tokens)
            yield CostedOperation(2.0 * tokens * sizes.top_k * layers, read), True
