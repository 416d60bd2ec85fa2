# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks several tokens of a sequence in one step: its latest one, and guesses of those behind it.

    guess     a `ServedDrafter` guesses K tokens behind the latest one of each sequence
    check     the next step computes the latest token and the guesses as K + 1 single tokens of one
              sequence, each with the same table of pages, and draws the token behind each of them
    accept    the drawn tokens up to the first that is not the guess; all of them if all are

Each token is drawn from the logits of the model with the key of its number, so that an answer has
the tokens that it has without guesses, sampled or not. A plan does not know of guesses: they have a
place where the pages of a sequence have room behind its latest token, none is preempted for them,
and what a wrong one has left in a page is written again by the next step before it is read.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.models.config import ModelConfig
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.inputs import PlacedWork
from jaxmoe.serve.device.step import Pools
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.requests import Result
from jaxmoe.serve.step import EngineStep, Work


class ComputedWork(NamedTuple):
    """Work of a step whose results are known."""

    work: Work
    """The work without guesses; `history` holds all tokens up to its last."""
    place: int
    """Place of its first token among those of the step."""
    drawn: tuple[int, ...]
    """Tokens that were drawn behind it, of which all but the last are computed too; none where it
    is a part of a prompt that draws none."""

    @property
    def end(self) -> int:
        """Position behind its last computed token: that of the last drawn one."""
        return self.work.start + len(self.work.tokens) + max(len(self.drawn) - 1, 0)


class ComputedStep(NamedTuple):
    """Step whose results are known."""

    works: Sequence[ComputedWork]
    """Single tokens, then pieces."""
    hidden: Any
    """States of its tokens behind the final norm [1 T D], on the device."""
    pieces: tuple[int, int]
    """Number and length of the compiled pieces beside the single tokens."""
    context_length: int
    """Tokens of a sequence that attention reads."""


class ServedDrafter(abc.ABC):
    """What guesses the next tokens of sequences from the states of a model behind its last layer.

    `jaxmoe.models.predictor.Predictor.drafter` makes one. The executor keeps its pools with the
    pages of the model: a page has the same number in all of them, and goes to host memory with
    them.
    """

    @property
    @abc.abstractmethod
    def depth(self) -> int:
        """Tokens that are guessed for each sequence (K)."""

    @abc.abstractmethod
    def initial_pools(self, *, pages: int, size: int) -> Pools:
        """Return empty pages [layers pages size ...] of what is kept for each token.

        Args:
            pages: Number of pages.
            size: Positions of a page.
        """

    @abc.abstractmethod
    def guess(
        self, params: Any, router_state: Any, pools: Pools, step: ComputedStep
    ) -> tuple[Any, Pools]:
        """Return guesses [works and more, K] on the device, and the pools after the step.

        Args:
            params: Parameters of the model.
            router_state: State of its routers.
            pools: Pools of `initial_pools`, which are donated.
            step: Step that the guesses follow.
        """


class GuessedTokens:
    """Guesses of the sequences of the last step, and what becomes of them."""

    def __init__(self, drafter: ServedDrafter, config: ExecutorConfig):
        """Begin without guesses.

        Args:
            drafter: Makes the guesses.
            config: Sizes of the executor, without guesses.
        """
        self.drafter = drafter
        self._config = config
        self.forget()

    def forget(self) -> None:
        """Begin without guesses again."""
        self._guesses: Any = None
        self._rows: dict[int, tuple[int, int]] = {}

    @property
    def compiled(self) -> ExecutorConfig:
        """Sizes with K + 1 single tokens for each sequence."""
        shapes = self._config.shapes
        singles = shapes.singles * (1 + self.drafter.depth)
        return dataclasses.replace(
            self._config, shapes=Shapes(singles=singles, pieces=shapes.pieces)
        )

    def added_to(self, step: EngineStep) -> EngineStep:
        """Return a step in which the guesses behind a single token are single tokens too.

        A request whose logits depend on the tokens before is computed without guesses.

        Args:
            step: Step with its pages taken.
        """
        if self._guesses is None or not step.singles:
            return step
        guesses = np.asarray(self._guesses)
        singles = list[Work]()
        for work in step.singles:
            singles.append(work)
            row, position = self._rows.get(work.id, (0, -1))
            if position != work.start or work.sampling.changes_logits(work.index):
                continue
            for number, guess in enumerate(guesses[row, : self._room(work)].tolist(), 1):
                singles.append(
                    dataclasses.replace(
                        work,
                        tokens=(guess,),
                        start=work.start + number,
                        index=work.index + number,
                    )
                )
        return dataclasses.replace(step, singles=tuple(singles))

    def _room(self, work: Work) -> int:
        """Return how many tokens behind that of a work may be computed and drawn with it."""
        places = min(len(work.pages) * self._config.page_size, self._config.context_lengths[-1])
        return min(places - work.start, work.sampling.max_tokens - work.index) - 1

    def checked(
        self, places: Sequence[PlacedWork], results: Sequence[Result | None]
    ) -> tuple[dict[int, Result], list[ComputedWork]]:
        """Return the results of a step by sequence, and its works without guesses.

        Args:
            places: Works of the step and their places, guesses behind the tokens before them.
            results: Result of each; None where there is none.
        """
        by_sequence: dict[int, list[tuple[Work, int, Result | None]]] = {}
        for (work, _, place), result in zip(places, results, strict=True):
            by_sequence.setdefault(work.id, []).append((work, place, result))
        checked_results: dict[int, Result] = {}
        computed = list[ComputedWork]()
        for id_, rows in by_sequence.items():
            work, place, result = rows[0]
            if result is None or not work.draws:
                computed.append(ComputedWork(work, place, ()))
                if result is not None:
                    checked_results[id_] = result
                continue
            accepted = [result]
            for guess, _, next_result in rows[1:]:
                if next_result is None or guess.tokens[0] != accepted[-1].token:
                    break
                accepted.append(next_result)
            drawn = tuple(accepted_result.token for accepted_result in accepted)
            computed.append(ComputedWork(work, place, drawn))
            checked_results[id_] = dataclasses.replace(
                result, further=tuple(accepted[1:]), num_guessed=len(rows) - 1
            )
        return checked_results, computed

    def remember(self, works: Sequence[ComputedWork], guesses: Any) -> None:
        """Keep guesses until the next step.

        Args:
            works: Works that they follow.
            guesses: Guesses of each work [works and more, K].
        """
        self._guesses = guesses
        self._rows = {
            computed.work.id: (row, computed.end)
            for row, computed in enumerate(works)
            if computed.drawn
        }


def guesses_of(
    model: ModelConfig, execution: Any, config: ExecutorConfig, adapters: Sequence[str]
) -> GuessedTokens | None:
    """Return what guesses the tokens of an executor; None where its sizes ask for no drafts.

    Args:
        model: Config of the model.
        execution: How it is computed.
        config: Sizes of the executor.
        adapters: Adapters that are served with the model.

    Raises:
        ValueError: The model has nothing that drafts, or it cannot draft as it is served.
    """
    if not config.drafts:
        return None
    if model.extras.predictor is None:
        raise ValueError(
            "drafts=True: drafts are made by modules of the model, and model.options.predictor is"
            " not set: serve it without drafts"
        )
    if adapters:
        raise ValueError(
            f"drafts=True: modules draft for the model alone, and it is served with the adapters"
            f" {', '.join(adapters)}: serve it without drafts, or one folded run"
        )
    return GuessedTokens(model.extras.predictor.drafter(model, execution, config), config)
