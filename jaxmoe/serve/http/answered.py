# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes answers as the JSON objects of OpenAI's API, whole or in chunks of a stream.

Further fields of a choice, where a request asks for them:

    token_ids          ids of its tokens, those of a stop string that was cut off included
    prompt_token_ids   ids of its prompt; in a stream with the first chunk
    routed_experts     experts [tokens L K] in the L MoE layers of prompt and answer, but for the
                       last token of the answer, which is not computed; E marks an empty slot. The
                       arrays of a stream's chunks, one behind the other, are the whole one
"""

from __future__ import annotations

import abc
import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from jaxmoe.serve.answers import Ended, Generated, whole_experts
from jaxmoe.serve.http.asked import Asked
from jaxmoe.serve.http.served import Served


@dataclasses.dataclass(kw_only=True)
class Choice:
    """One answer as it grows."""

    index: int
    """Number among the answers of the request."""
    text: str = ""
    """Text so far."""
    tokens: list[Generated] = dataclasses.field(default_factory=list)
    """Tokens so far."""
    ended: Ended | None = None
    """Its end."""
    has_begun: bool = False
    """Whether a part of it was written into a stream."""


def usage(ends: Sequence[Ended], number: int) -> dict[str, Any]:
    """Return the counts of tokens.

    Args:
        ends: Ends of all answers, those of one prompt side by side.
        number: Answers of each prompt, which is counted once.
    """
    firsts = ends[::number]
    prompt, written = sum(e.num_prompt for e in firsts), sum(e.num_generated for e in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(e.num_cached for e in firsts)},
    }


class Form(abc.ABC):
    """Form of the answers of one route."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, served: Served, asked: Asked):
        """Begin the answer to one request.

        Args:
            served: The model.
            asked: The request.
        """
        self._served, self._asked = served, asked
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(self, choices: Sequence[Choice], counts: dict[str, Any]) -> dict[str, Any]:
        """Return the object of all answers.

        Args:
            choices: Answers that have ended.
            counts: Counts of tokens.
        """
        written = [self._whole(one) | self._end(one, one.tokens) for one in choices]
        return self._head | {"object": self.kind, "choices": written, "usage": counts}

    def chunk(self, choice: Choice, new: str, tokens: Sequence[Generated]) -> dict[str, Any]:
        """Return the object of a part of an answer.

        Args:
            choice: The answer; its end is written with its last part.
            new: Text of the part.
            tokens: Tokens of the part.
        """
        written = self._part(choice, new) | self._end(choice, tokens)
        choice.has_begun = True
        return self._head | {"object": self.chunk_kind, "choices": [written]}

    def counted(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Return the object that ends a stream with the counts of tokens."""
        return self._head | {"object": self.chunk_kind, "choices": [], "usage": counts}

    def _end(self, choice: Choice, tokens: Sequence[Generated]) -> dict[str, Any]:
        reason = None if choice.ended is None else choice.ended.reason
        logprobs = None if self._asked.num_logprobs is None else self._logprobs(choice, tokens)
        end = {"index": choice.index, "finish_reason": reason, "logprobs": logprobs}
        return end | self._of_tokens(choice, tokens)

    def _of_tokens(self, choice: Choice, tokens: Sequence[Generated]) -> dict[str, Any]:
        """Return the ids and experts of tokens, as far as they are asked for."""
        found: dict[str, Any] = {}
        if self._asked.has_token_ids:
            if not choice.has_begun:
                prompt = self._asked.prompts[choice.index // self._asked.number]
                found["prompt_token_ids"] = list(prompt)
            found["token_ids"] = [one.token for one in tokens]
        if self._asked.sampling.has_experts:
            experts = whole_experts(tokens)
            found["routed_experts"] = [] if experts is None else experts.tolist()
        return found

    def _spelled(self, token: int) -> str:
        return self._served.text([token])

    @abc.abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """Return the text of a whole answer."""

    @abc.abstractmethod
    def _part(self, choice: Choice, new: str) -> dict[str, Any]:
        """Return the text of a part of an answer."""

    @abc.abstractmethod
    def _logprobs(self, choice: Choice, tokens: Sequence[Generated]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""


class CompletionForm(Form):
    """Answers of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def _part(self, choice: Choice, new: str) -> dict[str, Any]:
        return {"text": new}

    def _logprobs(self, choice: Choice, tokens: Sequence[Generated]) -> dict[str, Any]:
        spelled = [self._spelled(one.token) for one in tokens]
        offset = len("".join(self._spelled(one.token) for one in choice.tokens))
        ends, at = [], offset - len("".join(spelled))
        for text in spelled:
            ends.append(at)
            at += len(text)
        return {
            "tokens": spelled,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [
                {self._spelled(token): value for token, value in one.alternatives} for one in tokens
            ],
            "text_offset": ends,
        }


class ChatForm(Form):
    """Answers of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}

    def _part(self, choice: Choice, new: str) -> dict[str, Any]:
        role = {} if choice.has_begun else {"role": "assistant"}
        return {"delta": role | {"content": new}}

    def _logprobs(self, choice: Choice, tokens: Sequence[Generated]) -> dict[str, Any]:
        def entry(token: int, value: float | None) -> dict[str, Any]:
            text = self._spelled(token)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        return {
            "content": [
                entry(one.token, one.logprob)
                | {"top_logprobs": [entry(token, value) for token, value in one.alternatives]}
                for one in tokens
            ]
        }
