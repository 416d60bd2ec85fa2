# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a policy is built with: sizes, shapes and costs that do not change while serving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from jaxmoe.serve.plan import EvictionKind, Shapes
from jaxmoe.serve.sequence import Sequence as ServedSequence

Victim = Callable[[Sequence[ServedSequence]], tuple[ServedSequence, EvictionKind]]
"""Chooses which running sequence gives its pages back, and how."""


def youngest(candidates: Sequence[ServedSequence]) -> tuple[ServedSequence, EvictionKind]:
    """Return the sequence that is served last, to be computed again."""
    return max(candidates, key=lambda sequence: sequence.rank), "recompute"


@dataclasses.dataclass(slots=True)
class WorkPart:
    """Tokens of one sequence within a step, as the cost model sees them.

    Not frozen: a simulator makes one for each token of an answer.
    """

    count: int
    """Tokens to compute."""
    context: int = 0
    """Computed tokens before them."""
    layers: tuple[int, int] | None = None
    """First layer and the one after the last; None for all layers."""


@runtime_checkable
class CostModel(Protocol):
    """Says how long a step takes."""

    def seconds(
        self, parts: Sequence[WorkPart], *, share: float = 1.0, nano_batches: int = 1
    ) -> float:
        """Return the seconds of a step.

        Args:
            parts: Work of each sequence.
            share: Share of the device.
            nano_batches: Parts into which the step is cut to overlap its resources.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Properties of an instance."""

    num_pages: int
    """Pages of the pool."""
    page_size: int = 16
    """Tokens of a page (G)."""
    max_running: int = 256
    """Running sequences at most (R)."""
    max_length: int = 2**20
    """Tokens of a sequence at most, prompt included."""
    max_waiting: int = 2**20
    """Sequences in the queue at most; further ones are refused."""
    num_layers: int = 1
    """Layers of the model."""
    steps_at_once: int = 1
    """Steps that run at the same time at most."""
    steps_ahead: int = 0
    """Steps that may start before the tokens of those before them are known: 1 for an executor that
    hands them over on the device."""
    tells_history: bool = False
    """Whether the works of a step tell the tokens before them, which an executor drafts with."""
    shapes: Shapes | None = None
    """Compiled shapes; None takes any number of pieces of any length."""
    capabilities: frozenset[str] = frozenset({"pages"})
    """What the executor has: keys and values in "pages", two "partitions" that run at once, pieces
    that stop between "layers". Configs and policies ask."""
    cost: CostModel | None = None
    """Time of a step; None if it is not known."""
    victim: Victim = youngest
    """Which sequence is preempted."""
    kv_bytes: float = 0.0
    """Bytes of keys and values of one token; 0 if not known."""
    group: int = 1
    """Pages side by side that are taken for one sequence while there are such."""
    host_pages: int = 0
    """Pages of which host memory keeps a copy after they have returned; 0 for none."""

    def piece(self, count: int, counts: Sequence[int]) -> int:
        """Return the tokens that the next piece may have; 0 if no shape takes another.

        Args:
            count: Tokens that are left and within the budget.
            counts: Tokens of the pieces so far.
        """
        room = count if self.shapes is None else min(count, self.shapes.room(counts))
        return max(room, 0)
