# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Pieces of prompts that stop between layers: drafted, checked, and kept until the last layer."""

from __future__ import annotations

import collections.abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmoe.serve.draft import Draft
from jaxmoe.serve.facts import Facts, Victim
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.plan import EvictionKind, Plan, PlanError, PromptPiece
from jaxmoe.serve.requests import End, EndReason, Event
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.step import EngineStep, Work
from jaxmoe.serve.view import InstanceView

Layers = tuple[int, int]
"""First layer and the one after the last."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayersPiece(PromptPiece):
    """Part of a prompt to compute in some layers."""

    layers: Layers


@dataclasses.dataclass(kw_only=True, slots=True)
class LayersWork(Work):
    """Tokens of one sequence in some layers."""

    layers: Layers


@dataclasses.dataclass(frozen=True, slots=True)
class LayerProgress:
    """How far the piece of a sequence has come, between two steps."""

    layers: int
    """Layers that it has passed."""
    count: int
    """Tokens of the piece."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayersView(InstanceView):
    """State of an instance, whose running sequences may be between two layers."""

    progress: Mapping[int, LayerProgress]
    """Progress of the running sequences that are between two layers."""


@dataclasses.dataclass(frozen=True, slots=True)
class WholeVictim:
    """Chooses whom another function chooses; between two layers it is computed again."""

    victim: Victim

    def __call__(
        self, candidates: collections.abc.Sequence[Sequence]
    ) -> tuple[Sequence, EvictionKind]:
        """Return a sequence, and how it is evicted."""
        sequence, kind = self.victim(candidates)
        return sequence, "recompute" if sequence.is_busy else kind


class LayersDraft(Draft):
    """A plan under construction, with pieces that stop between layers."""

    def __init__(self, view: InstanceView):
        self._progress = view.progress if isinstance(view, LayersView) else {}
        super().__init__(view)

    def layers_done(self, sequence: Sequence) -> int:
        """Return the layers that the piece of a sequence has passed; 0 without one."""
        progress = self._progress.get(sequence.id)
        return 0 if progress is None else progress.layers

    def piece_size(self, sequence: Sequence) -> int:
        """Return the tokens of the piece that a sequence is in, or of all that is left."""
        progress = self._progress.get(sequence.id)
        return self.left(sequence) if progress is None else progress.count

    def decoding(self) -> list[Sequence]:
        """Return the running sequences of which one token is left in all layers."""
        return [s for s in super().decoding() if s.id not in self._progress]

    def prompts(self) -> list[Sequence]:
        """Return the others, those between two layers too."""
        return self.running(lambda s: self.left(s) > 1 or s.id in self._progress)

    def layers_piece(self, sequence: Sequence, count: int, layers: Layers | None) -> int:
        """Compute part of a prompt in some layers.

        Args:
            sequence: Running or waiting sequence.
            count: Tokens; those of the piece where one has begun.
            layers: First layer and the one after the last; None for all layers.

        Returns:
            Tokens that have a place, 0 if none.
        """
        progress = self._progress.get(sequence.id)
        count = self.view.facts.piece(min(count, self.left(sequence)), self.counts())
        if progress is not None and count != progress.count:
            return 0
        count = self.piece(sequence, count)
        if count and layers is not None:
            self._pieces[-1] = LayersPiece(sequence.id, count, layers)
        return count


class LayersInstance(Instance):
    """Requests of one instance whose pieces may stop between layers.

    A sequence in between stays busy for everybody but the policy.
    """

    def __init__(self, facts: Facts, policy: str = "policy", *, has_sharing: bool = True):
        facts = dataclasses.replace(facts, victim=WholeVictim(facts.victim))
        super().__init__(facts, policy, has_sharing=has_sharing)
        self._progress: dict[int, LayerProgress] = {}

    def view(self, now: float) -> LayersView:
        """Return what a policy may see: sequences between two layers are running."""
        fields = self._visible(now)
        if not self._progress:
            return LayersView(**fields, progress=self._progress)
        flying = {work.id for step in self.flying for work in step.works}
        progress = {id_: state for id_, state in self._progress.items() if id_ not in flying}
        running = self.queues.running.values()
        if progress:
            fields["running"] = tuple(s for s in running if not s.is_busy or s.id in progress)
            fields["busy"] = tuple(s for s in running if s.is_busy and s.id not in progress)
        return LayersView(**fields, progress=progress)

    def start(
        self, plan: Plan, now: float, view: InstanceView | None = None
    ) -> tuple[EngineStep, ...]:
        """Check the layers of a plan too, and start its step."""
        for piece in plan.pieces:
            self._check_layers(piece)
        steps = super().start(plan, now, view)
        for eviction in plan.evict:
            if self._progress.pop(eviction.id, None) is not None:
                self.queues.sequences[eviction.id].is_busy = False
        layers = {piece.id: piece.layers for piece in plan.pieces if isinstance(piece, LayersPiece)}
        if not steps or not layers:
            return steps
        (step,) = steps
        pieces = (
            self._in_layers(work, layers[work.id]) if work.id in layers else work
            for work in step.pieces
        )
        self.flying[-1] = dataclasses.replace(step, pieces=tuple(pieces))
        return (self.flying[-1],)

    def end(self, sequence: Sequence, reason: EndReason, message: str = "") -> End:
        """End a sequence that no step computes."""
        self._progress.pop(sequence.id, None)
        return super().end(sequence, reason, message)

    def _check_layers(self, piece: PromptPiece) -> None:
        progress = self._progress.get(piece.id)
        done = 0 if progress is None else progress.layers
        if isinstance(piece, LayersPiece):
            first, last = piece.layers
            fits = "layers" in self.facts.capabilities
            fits = fits and first == done < last <= self.facts.num_layers
            fits = fits and (progress is None or piece.count == progress.count)
        else:
            fits = done == 0
        if not fits:
            detail = f"{piece}: sequence {piece.id} is at layer {done}"
            raise PlanError(self.policy, "layers", detail)

    def _in_layers(self, work: Work, layers: Layers) -> LayersWork:
        fields = {field.name: getattr(work, field.name) for field in dataclasses.fields(work)}
        fields["draws"] = work.draws and layers[1] == self.facts.num_layers
        return LayersWork(**fields, layers=layers)

    def _take_over(
        self, sequence: Sequence, work: Work, result: Any, now: float
    ) -> tuple[Event, ...]:
        if isinstance(work, LayersWork) and work.layers[1] < self.facts.num_layers:
            self._progress[work.id] = LayerProgress(work.layers[1], len(work.tokens))
            sequence.is_busy = True
            return ()
        self._progress.pop(work.id, None)
        return super()._take_over(sequence, work, result, now)


def layers_of(work: Work) -> Layers | None:
    """Return the layers that compute some work; None for all.

    Args:
        work: Work of a step.
    """
    return work.layers if isinstance(work, LayersWork) else None
