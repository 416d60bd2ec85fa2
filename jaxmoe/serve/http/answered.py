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
import codecs
import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.data.source import token_bytes
from jaxmoe.serve.answers import AnswerEvent, Ended, Generated, whole_experts
from jaxmoe.serve.http.asked import Asked
from jaxmoe.serve.http.messages import MessageStream, delta, whole_message
from jaxmoe.serve.http.served import Served
from jaxmoe.serve.requests import PromptScore


class Spelled:
    """Counts the characters of tokens, of which a character may need several."""

    def __init__(self, *, has_text: bool):
        """Begin to count.

        Args:
            has_text: Whether text precedes the first token.
        """
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.has_text = has_text
        """Whether text precedes the next token."""
        self.offset = 0
        """Whole characters of all tokens."""

    def add(self, token: bytes) -> None:
        """Take the bytes of a token."""
        self.has_text = self.has_text or bool(token)
        self.offset += len(self._decoder.decode(token))


@dataclasses.dataclass(kw_only=True)
class AnswerChoice:
    """One answer as it grows."""

    index: int
    """Number among the answers of the request."""
    texts: list[str] = dataclasses.field(default_factory=list)
    """Parts of the text so far."""
    tokens: list[Generated] = dataclasses.field(default_factory=list)
    """Tokens so far."""
    ended: Ended | None = None
    """Its end."""
    prompt: tuple[PromptScore, ...] | None = None
    """Scores of the tokens of its prompt behind the first."""
    has_begun: bool = False
    """Whether a part of it was written into a stream."""
    message: MessageStream | None = None
    """Its message, where it is one."""
    spelled: Spelled | None = None
    """Text of the tokens whose log-probabilities were written."""

    @property
    def text(self) -> str:
        """Text so far."""
        return "".join(self.texts)


class Form(abc.ABC):
    """Form of the answers of one route."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, served: Served, request: Asked):
        """Begin the answer to one request.

        Args:
            served: The model.
            request: The request.
        """
        self._served = served
        self._asked = request
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }

    def take(self, choice: AnswerChoice, event: AnswerEvent) -> tuple[str, Sequence[Generated]]:
        """Take an event into its answer; return the text and the tokens that it adds.

        Args:
            choice: The answer.
            event: Its next event.
        """
        asked = self._asked
        is_first = not choice.tokens and not choice.texts and choice.prompt is None
        text = event.text if asked.has_answer else ""
        tokens = list[Generated]()
        if isinstance(event, Generated):
            choice.prompt = event.prompt if event.prompt is not None else choice.prompt
            tokens = [event] if asked.has_answer else []
        elif asked.has_answer or event.reason in ("refused", "error", "cancelled"):
            choice.ended = event
        else:
            choice.ended = dataclasses.replace(event, reason="length", num_generated=0)
        if asked.has_echo and is_first:
            prompt = asked.prompts[choice.index // asked.number]
            text = self._served.codec.decode(np.asarray(prompt, np.int32)) + text
        choice.texts += [text] if text else []
        choice.tokens += tokens
        return text, tokens

    def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """Return the object of all answers.

        Args:
            choices: Answers that have ended.
        """
        # The text comes first: why an answer ended depends on what is in it.
        texts = [self._whole(choice) for choice in choices]
        written = [
            text | self._shared_fields(choice, choice.tokens)
            for text, choice in zip(texts, choices, strict=True)
        ]
        counts = self._counts(choices)
        return self._head | {"object": self.kind, "choices": written, "usage": counts}

    def chunks(
        self, choice: AnswerChoice, new: str, tokens: Sequence[Generated]
    ) -> list[dict[str, Any]]:
        """Return the objects of a part of an answer; none where it has nothing to tell.

        Args:
            choice: The answer; its end is written with its last part.
            new: Text of the part.
            tokens: Tokens of the part.
        """
        parts = self._parts(choice, new)
        if not parts and (choice.ended is not None or self._asked.tells_of_tokens):
            parts = [self._part(choice, "")]
        chunks = []
        for number, part in enumerate(parts, 1):
            is_last = number == len(parts)
            shared = self._shared_fields(choice, tokens if is_last else ())
            if not is_last:
                shared["finish_reason"] = None
            choice.has_begun = True
            chunks.append(self._head | {"object": self.chunk_kind, "choices": [part | shared]})
        return chunks

    def usage_chunk(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """Return the object that ends a stream with the counts of tokens.

        Args:
            choices: Answers that have ended.
        """
        counts = self._counts(choices)
        return self._head | {"object": self.chunk_kind, "choices": [], "usage": counts}

    def _counts(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """Return the counts of tokens of all answers; a prompt is counted once."""
        ends = [choice.ended for choice in choices if choice.ended is not None]
        firsts = ends[:: self._asked.number]
        prompt = sum(ending.num_prompt for ending in firsts)
        written = sum(ending.num_generated for ending in ends)
        counts: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(e.num_cached for e in firsts)},
        }
        if self._asked.message is not None:
            number = sum(map(_num_reasoning, choices))
            counts["completion_tokens_details"] = {"reasoning_tokens": number}
        return counts

    def usage_so_far(self, choice: AnswerChoice) -> dict[str, int]:
        """Return the counts of tokens of one answer that grows."""
        prompt = len(self._asked.prompts[choice.index // self._asked.number])
        written = len(choice.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        }

    def _shared_fields(self, choice: AnswerChoice, tokens: Sequence[Generated]) -> dict[str, Any]:
        """Return the fields that whole answers and their parts have on every route."""
        reason = None if choice.ended is None else self._reason(choice, choice.ended)
        logprobs = None if self._asked.num_logprobs is None else self._logprobs(choice, tokens)
        fields = {"index": choice.index, "finish_reason": reason, "logprobs": logprobs}
        return fields | self._of_tokens(choice, tokens)

    def _of_tokens(self, choice: AnswerChoice, tokens: Sequence[Generated]) -> dict[str, Any]:
        """Return the ids and experts of tokens, as far as they are asked for."""
        fields: dict[str, Any] = {}
        if self._asked.num_prompt_logprobs is not None and not choice.has_begun:
            fields["prompt_logprobs"] = self._prompt_logprobs(choice)
        if self._asked.has_token_ids:
            if not choice.has_begun:
                prompt = self._asked.prompts[choice.index // self._asked.number]
                fields["prompt_token_ids"] = list(prompt)
            fields["token_ids"] = [generated.token for generated in tokens]
        if self._asked.sampling.has_experts:
            experts = whole_experts(tokens)
            fields["routed_experts"] = [] if experts is None else experts.tolist()
        return fields

    def _prompt_logprobs(self, choice: AnswerChoice) -> list[dict[str, Any] | None] | None:
        """Return the scores of the tokens of a prompt, as vLLM writes them; None for its first."""
        if choice.prompt is None:  # the answer has ended before
            return None
        prompt = self._asked.prompts[choice.index // self._asked.number]
        number = self._asked.num_prompt_logprobs or 0
        scores: list[dict[str, Any] | None] = [None]
        for token, score in zip(prompt[1:], choice.prompt, strict=True):
            entries = {token: (score.logprob, score.rank)}
            for rank, (other_id, value) in enumerate(score.alternatives[:number], 1):
                entries.setdefault(other_id, (value, rank))
            scores.append(
                {
                    str(id_): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": _text_of(token_bytes(self._served.codec, id_)),
                    }
                    for id_, (value, rank) in entries.items()
                }
            )
        return scores

    def _bytes(self, choice: AnswerChoice, generated: Generated) -> dict[int, bytes]:
        """Return the bytes that a token, and each alternative, adds to the text of a choice.

        An id that ends the text has none.
        """
        spelled = self._spelling(choice)
        bytes_of_tokens = dict[int, bytes]()
        for token in (generated.token, *(token for token, _ in generated.alternatives)):
            sampling = self._asked.sampling
            is_end = token in sampling.stop_ids and not sampling.has_stop
            bytes_of_tokens[token] = (
                b""
                if is_end
                else token_bytes(self._served.codec, token, is_first=not spelled.has_text)
            )
        spelled.add(bytes_of_tokens[generated.token])
        return bytes_of_tokens

    def _spelling(self, choice: AnswerChoice) -> Spelled:
        """Return the count of the characters of a choice."""
        if choice.spelled is None:
            prompt = self._asked.prompts[choice.index // self._asked.number]
            has_text = not self._asked.has_echo and self._served.has_text(prompt)
            choice.spelled = Spelled(has_text=has_text)
        return choice.spelled

    @abc.abstractmethod
    def _reason(self, choice: AnswerChoice, ending: Ended) -> str:
        """Return why an answer ended."""

    @abc.abstractmethod
    def _parts(self, choice: AnswerChoice, new: str) -> list[dict[str, Any]]:
        """Return what the chunks of a part of an answer say of its text."""

    @abc.abstractmethod
    def _whole(self, choice: AnswerChoice) -> dict[str, Any]:
        """Return the text of a whole answer."""

    @abc.abstractmethod
    def _part(self, choice: AnswerChoice, new: str) -> dict[str, Any]:
        """Return the text of a part of an answer."""

    @abc.abstractmethod
    def _logprobs(self, choice: AnswerChoice, tokens: Sequence[Generated]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""


class CompletionForm(Form):
    """Answers of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _whole(self, choice: AnswerChoice) -> dict[str, Any]:
        return {"text": choice.text}

    def _part(self, choice: AnswerChoice, new: str) -> dict[str, Any]:
        return {"text": new}

    def _parts(self, choice: AnswerChoice, new: str) -> list[dict[str, Any]]:
        return [self._part(choice, new)] if new else []

    def _reason(self, choice: AnswerChoice, ending: Ended) -> str:
        return ending.reason

    def _logprobs(self, choice: AnswerChoice, tokens: Sequence[Generated]) -> dict[str, Any]:
        texts = []
        alternatives: list[dict[str, float] | None] = []
        offsets = []
        echo = self._echo(choice)
        for generated in (*echo, *tokens):
            offsets.append(self._spelling(choice).offset)
            names = _distinct(self._bytes(choice, generated))
            texts.append(names[generated.token])
            top = {names[token]: value for token, value in generated.alternatives}
            if generated.logprob is not None:  # the token itself stands behind the most likely
                top.setdefault(names[generated.token], generated.logprob)
            alternatives.append(top)
        if echo:  # nothing stands before the first token
            alternatives[0] = None
        return {
            "tokens": texts,
            "token_logprobs": [generated.logprob for generated in (*echo, *tokens)],
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }

    def _echo(self, choice: AnswerChoice) -> Sequence[Generated]:
        """Return the tokens of the prompt with their scores, before the first of an answer."""
        if not self._asked.has_echo or choice.has_begun or choice.prompt is None:
            return ()
        first, *later = self._asked.prompts[choice.index // self._asked.number]
        number = self._asked.num_logprobs
        scored = [
            Generated(
                index=0,
                token=token,
                logprob=score.logprob,
                alternatives=score.alternatives[:number],
            )
            for token, score in zip(later, choice.prompt, strict=True)
        ]
        return [Generated(index=0, token=first), *scored]


def _distinct(spelled: dict[int, bytes]) -> dict[int, str]:
    """Return a name for each token: its text, where no token before it has the same.

    The keys of an object are distinct: others are named by their ids, as vLLM names them.
    """
    texts = dict[int, str]()
    for token, content in spelled.items():
        name = _text_of(content, "bytes:")
        texts[token] = f"token_id:{token}" if name in texts.values() else name
    return texts


def _text_of(content: bytes, mark: str = "") -> str:
    """Return the text of a token; the bytes of a part of a character as OpenAI's API spells them.

    Args:
        content: Bytes of the token.
        mark: What stands before bytes.
    """
    try:
        return content.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in content)


class ChatForm(Form):
    """Answers of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def _whole(self, choice: AnswerChoice) -> dict[str, Any]:
        stream = self._message(choice)
        stream.add(choice.text, is_last=True)
        message = {"role": "assistant", "refusal": None}
        return {"message": message | whole_message(stream.parts)}

    def _part(self, choice: AnswerChoice, new: str) -> dict[str, Any]:
        message = self._message(choice)
        is_content = new or message.has_content or not message.parts
        return _delta(choice, {"content": new} if is_content else {})

    def _parts(self, choice: AnswerChoice, new: str) -> list[dict[str, Any]]:
        is_last = choice.ended is not None
        parts = self._message(choice).add(new, is_last=is_last) if new or is_last else []
        deltas = [delta(part) for part in parts]
        return [_delta(choice, fields, is_begun=number > 0) for number, fields in enumerate(deltas)]

    def _reason(self, choice: AnswerChoice, ending: Ended) -> str:
        is_call = ending.reason == "stop" and self._message(choice).has_calls
        return "tool_calls" if is_call else ending.reason

    def _message(self, choice: AnswerChoice) -> MessageStream:
        """Return the message of an answer as it grows."""
        if choice.message is None:
            assert self._asked.message is not None  # `read_chat` has made it
            choice.message = MessageStream(self._asked.message)
        return choice.message

    def _logprobs(self, choice: AnswerChoice, tokens: Sequence[Generated]) -> dict[str, Any]:
        content = []
        for generated in tokens:
            spelled = self._bytes(choice, generated)
            several = [_entry(spelled[token], value) for token, value in generated.alternatives]
            content.append(
                _entry(spelled[generated.token], generated.logprob) | {"top_logprobs": several}
            )
        return {"content": content}


def _num_reasoning(choice: AnswerChoice) -> int:
    """Return the tokens of the reasoning of a message that has ended."""
    if choice.message is None or choice.ended is None:
        return 0
    lengths = [len(generated.text) for generated in choice.tokens]
    return choice.message.num_reasoning(lengths, len(choice.ended.text))


def _delta(
    choice: AnswerChoice, fields: dict[str, Any], *, is_begun: bool = False
) -> dict[str, Any]:
    """Return the delta of a chunk; the first of an answer has the role."""
    role = {} if choice.has_begun or is_begun else {"role": "assistant"}
    return {"delta": role | fields}


def _entry(content: bytes, value: float | None) -> dict[str, Any]:
    """Return a token of a chat with its log-probability."""
    return {"token": _text_of(content), "logprob": value, "bytes": list(content)}
