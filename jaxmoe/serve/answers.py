# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers as clients receive them: tokens with their text, the end, and text that is certain.

Text is passed on as soon as no further token can change it: a part of a character, and what may be
the beginning of a stop string, are held back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.generation.text import TextCodec, added_text, certain_length, context_of, first_stop
from jaxmoe.serve.requests import EndReason, PromptScore


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """Event: a token of an answer."""

    index: int
    """Number of the token within the answer, from 0."""
    token: int
    """Its id."""
    text: str = ""
    """New text that is certain, of this token and earlier ones; empty without a codec."""
    logprob: float | None = None
    """Log-probability of the token."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """Most likely ids and their log-probabilities, as many as were asked for."""
    prompt: tuple[PromptScore, ...] | None = None
    """Scores of the tokens of the prompt behind its first, with the first token if asked for."""
    embedding: Any = None
    """Hidden state [D] of the last token of the prompt, with the first token if asked for."""
    experts: Any = None
    """Experts [tokens L K] of the tokens before this one that no earlier event had, if asked for;
    see `Result.experts`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Event: the end of an answer, the last event of its stream."""

    reason: EndReason
    """Why: a stop id or string, the limit of tokens, the client, a refusal, or a failed step."""
    message: str = ""
    """Explanation of `refused` and `error`."""
    text: str = ""
    """Text that was held back until now."""
    num_prompt: int = 0
    """Tokens of the prompt."""
    num_cached: int = 0
    """Tokens of the prompt whose keys and values were in the pool."""
    num_generated: int = 0
    """Tokens of the answer."""
    ttft: float | None = None
    """Seconds from the submission to the first token."""
    tpot: float | None = None
    """Mean seconds of each further token."""


AnswerEvent = Generated | Ended
"""Event of a stream."""


def whole_experts(events: Sequence[AnswerEvent]) -> np.ndarray | None:
    """Return the experts [tokens L K] of prompt and answer, but for the last token of the answer.

    These are the inputs of a training row, whose targets are the tokens behind them.

    Args:
        events: Events of a stream; None is returned where they have no experts.
    """
    parts = [event.experts for event in events if isinstance(event, Generated)]
    if not parts or any(part is None for part in parts):
        return None
    return np.concatenate(parts)


class TextStream:
    """Turns the tokens of one answer into text, in parts that only grow.

    Only the tokens since the last certain character are decoded again with each token.
    """

    def __init__(
        self,
        codec: TextCodec | None,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        has_stop: bool = False,
    ):
        """Begin an answer.

        Args:
            codec: Decoder of tokens; None gives no text.
            stop: Strings that end the text, which is cut before them.
            prompt: Token ids that the answer continues.
            min_tokens: Tokens in whose text no stop string is looked for.
            has_stop: Whether the text is cut behind a stop string instead.
        """
        self._codec, self._stop = codec, tuple(stop)
        self._tokens = context_of(prompt)
        self._text = ""
        self._shown = 0
        self._has_stop = has_stop
        self._num_unstopped = min_tokens
        self._first_stop = 0
        self._before, self._read = 0, len(self._tokens)
        self.is_stopped = False
        """Whether a stop string was found."""

    def add(self, token: int) -> str:
        """Take a token and return the new text that is certain.

        Args:
            token: Its id.
        """
        if self._codec is None or self.is_stopped:
            return ""
        self._tokens.append(token)
        self._text += self._decoded_further()
        if self._num_unstopped:
            self._num_unstopped -= 1
            self._first_stop = len(self._text)
            return self._show(certain_length(self._text, ()))
        cut = self._cut()
        end = certain_length(self._text, self._stop) if cut is None else cut
        return self._show(end)

    def finish(self) -> str:
        """Return the text that was held back, cut before a stop string."""
        if self._codec is None or self.is_stopped:
            return ""
        self._text += self._decoded_further(is_last=True)
        cut = self._cut()
        return self._show(len(self._text) if cut is None else cut)

    def _cut(self) -> int | None:
        """Return where a stop string cuts the text; None without one."""
        text = self._text[self._first_stop :]
        cut = first_stop(text, self._stop)
        self.is_stopped = cut < len(text)
        if not self.is_stopped:
            return None
        if self._has_stop:
            cut += next(len(end) for end in self._stop if text.startswith(end, cut))
        return self._first_stop + cut

    def _show(self, end: int) -> str:
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _decoded_further(self, *, is_last: bool = False) -> str:
        """Return the text of the tokens that were not read yet; none within a character.

        It is the difference of two decodings that begin at the same token, as decoders treat the
        first token apart.
        """
        before = self._decode(self._before, self._read)
        text = self._decode(self._before, len(self._tokens))
        new = added_text(before, text)
        if not is_last and (text.endswith("\ufffd") or not new):
            return ""
        self._before, self._read = self._read, len(self._tokens)
        return new

    def _decode(self, first: int, end: int) -> str:
        assert self._codec is not None  # asked by the callers
        return self._codec.decode(np.asarray(self._tokens[first:end], np.int32))
