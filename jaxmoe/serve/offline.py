# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers a list of prompts with an engine: for evaluation and samples, without a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxmoe.errors import JaxmoeError
from jaxmoe.generation.text import Codec
from jaxmoe.serve.answers import Ended, Generated
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.device.executor import ExecutorConfig
from jaxmoe.serve.engine import Engine, EngineConfig, Executor
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.requests import EndReason, Sampling

_PIECE, _SHORTEST = 64, 256


class ServingError(JaxmoeError, RuntimeError):
    """A step failed while prompts were answered."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt and how it is answered."""

    tokens: tuple[int, ...]
    """Token ids; at least one."""
    sampling: Sampling = Sampling()
    """How the answer is drawn."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeAnswer:
    """The answer to a prompt."""

    tokens: tuple[int, ...]
    """Generated ids, a stop id included."""
    text: str
    """Their text, cut before a stop id or string; empty without a codec."""
    reason: EndReason
    """Why it ended."""


def sizes_for(*, max_length: int, batch_size: int, page_size: int = 16) -> ExecutorConfig:
    """Return the sizes of an executor that never lacks pages.

    Args:
        max_length: Tokens of a prompt and its answer at most.
        batch_size: Prompts that are answered together.
        page_size: Tokens of a page.
    """
    lengths = {min(_SHORTEST, max_length), max_length}
    return ExecutorConfig(
        num_pages=batch_size * num_pages(max_length, page_size),
        page_size=page_size,
        shapes=Shapes(singles=batch_size, pieces=((1, min(_PIECE, max_length)),)),
        context_lengths=tuple(sorted(lengths)),
    )


def answer_all(
    executor: Executor, prompts: Iterable[Prompt], codec: Codec | None = None
) -> list[WholeAnswer]:
    """Return the answers to prompts of any lengths, computed together.

    Args:
        executor: Computes the steps.
        prompts: Prompts.
        codec: Decoder of tokens; None gives no text.

    Raises:
        ServingError: A prompt is too long, or a step failed.
    """
    given = list(prompts)
    config = EngineConfig(max_waiting=max(len(given), 1))
    with Engine(executor, config, codec=codec) as engine:
        streams = [engine.submit(one.tokens, one.sampling, stop=one.stop) for one in given]
        return [_whole(list[Any](stream)) for stream in streams]


def _whole(events: Sequence[Generated | Ended]) -> WholeAnswer:
    ended = events[-1]
    assert isinstance(ended, Ended)  # every stream has one
    if ended.message:
        raise ServingError(ended.message)
    generated = [event for event in events if isinstance(event, Generated)]
    return WholeAnswer(
        tokens=tuple(event.token for event in generated),
        text="".join(event.text for event in events),
        reason=ended.reason,
    )
