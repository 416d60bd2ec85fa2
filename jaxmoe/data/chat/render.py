# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Renders conversations as token ids, and finds the tokens to train on.

Training, a chat in the terminal and an HTTP endpoint all use `render`. The mask comes from rendered
prefixes: an answer is what the rendering of its conversation up to it has beyond the rendering of
the turns before, with the prompt of an answer. It ends with the template's end of an answer, where
generation stops; what a template writes after that (a line end) is not trained. Where a template
writes no end (GLM), an answer ends with the special token that begins the next turn: it is trained,
also behind the last answer, and stops generation. A template that writes a turn in another way when
more turns follow has no such prefixes; its answers are masked one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxmoe.data.chat.messages import ANSWER, ConversationError, Message
from jaxmoe.data.chat.template import ChatPiece, ChatTemplate
from jaxmoe.data.tokenizer import Tokenizer
from pallas_kernels.array_types import Int, Shaped

_MARK = "THE_CONTENT_ENDS_HERE "
"""Stands behind the content that is continued; a template that trims contents removes its space."""
TrainOn = Literal["assistant", "last", "all"]


class PrefixError(ConversationError):
    """A template writes a turn in another way when more turns follow."""


class Masked(NamedTuple):
    """A conversation to train on."""

    tokens: Int[np.ndarray, " S"]
    weights: Shaped[np.ndarray, " S"]
    """1 for a token to train on, else 0 (uint8)."""
    endless: int = 0
    """Trained answers without the end of an answer, which generation would not end."""


def render(
    messages: Sequence[Message],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool,
    is_continued: bool = False,
) -> Int[np.ndarray, " S"]:
    """Return the token ids of a conversation.

    Args:
        messages: Turns, in order.
        template: How turns are written.
        tokenizer: Tokenizer of text.
        add_generation_prompt: Whether to end with what comes before an answer, for generation.
        is_continued: Whether to end with the content of the last message, for an answer that
            continues it.

    Raises:
        ConversationError: The template cannot write these messages, or a message spells a text that
            would be read as control.
    """
    _check_contents(messages, template, tokenizer)
    if is_continued:
        pieces = _pieces_to_continue(messages, template)
    else:
        pieces = list(template.pieces(messages, add_generation_prompt=add_generation_prompt))
    # Calls of a message that is continued would stand behind its content.
    check_calls(messages[:-1] if is_continued else messages, pieces)
    return _encode(pieces, tokenizer, {})


def check_calls(messages: Sequence[Message], pieces: Sequence[ChatPiece]) -> None:
    """Check that a template has written the calls of its messages.

    Args:
        messages: Turns, in order.
        pieces: What the template made of them.

    Raises:
        ConversationError: The name of a function that is called is nowhere.
    """
    calls = [call.name for message in messages for call in message.calls]
    if calls and not all(name in "".join(piece.text for piece in pieces) for name in calls):
        raise ConversationError(
            f"an answer calls {calls[0]!r}, and the chat template of the tokenizer writes no calls:"
            " take a model that was made for calls, or leave the conversation out"
        )


def stop_sequences(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of ids that end an answer: generation stops after any of them.

    Args:
        template: How turns are written.
        tokenizer: Tokenizer of text; where it has no token for the end, the text is the sequence.
    """
    marks = _turn_marks(template, tokenizer)
    return tuple(dict.fromkeys((*_declared_ends(template, tokenizer), *((m,) for m in marks))))


def stop_ids(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that alone end an answer, of `stop_sequences`.

    Args:
        template: How turns are written.
        tokenizer: Tokenizer of text.
    """
    return tuple(end[0] for end in stop_sequences(template, tokenizer) if len(end) == 1)


def _declared_ends(template: ChatTemplate, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the sequences of ids that the template and its model name as ends."""
    ends = [] if template.end is None else [tuple(_control_ids(template.end, tokenizer).tolist())]
    # A file of a model may name ids beyond its vocabulary, which nothing writes.
    return [*ends, *((token,) for token in template.end_ids if token < tokenizer.vocab_size)]


@functools.lru_cache(maxsize=16)
def _turn_marks(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that end an answer where it has none of the declared ends.

    They are the one that the template writes behind its content, or those that begin the turn of a
    user or a tool.
    """
    turns = (Message("user", "a"), Message(ANSWER, "b"))
    try:
        start = len(_render(turns[:1], template, tokenizer, True, {}))
        answer = _render(turns, template, tokenizer, False, {})
    except ConversationError:
        return ()
    if any(_last_end(answer, start, end) for end in _declared_ends(template, tokenizer)):
        return ()
    special = frozenset(tokenizer.special_tokens)
    for place in range(len(answer), start, -1):
        text = tokenizer.spell(answer[place - 1 : place])
        if text in special:
            return (int(answer[place - 1]),)
        if text.strip():
            break
    marks = []
    for role in ("user", "tool"):
        with contextlib.suppress(ConversationError):
            more = _render((*turns, Message(role, "c")), template, tokenizer, False, {})
            following = more[len(answer) : len(answer) + 1]
            is_prefix = np.array_equal(more[: len(answer)], answer)
            if is_prefix and tokenizer.spell(following) in special:
                marks.append(int(following[0]))
    return tuple(dict.fromkeys(marks))


def mask_answers(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> list[Masked]:
    """Return each answer to train on, behind the turns before it: for templates without prefixes.

    Where the prompt of an answer is no prefix either (it opens thoughts that the answer has not),
    the answer begins where they part.

    Args:
        messages: Turns, in order.
        template: How turns are written.
        tokenizer: Tokenizer of text.

    Raises:
        ConversationError: As `render`, or the turns before an answer are no prefix.
    """
    return [
        _mask(messages[: number + 1], template, tokenizer, "last", may_part=True)
        for number in _answers(messages, is_trained=True)
    ]


def _answers(messages: Sequence[Message], *, is_trained: bool) -> list[int]:
    """Return the places of the answers to train on, or of the others."""
    return [
        number
        for number, message in enumerate(messages)
        if message.role == ANSWER and message.is_trained is is_trained
    ]


def mask_conversation(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer, train_on: TrainOn
) -> Masked:
    """Return the token ids of a conversation, and which of them to train on.

    Args:
        messages: Turns, in order.
        template: How turns are written.
        tokenizer: Tokenizer of text.
        train_on: assistant: every answer. last: the last answer. all: every token but the first.
            Of none an answer that is not to be trained on.

    Raises:
        ConversationError: As `render`, or the rendering of a prefix is no prefix.
    """
    return _mask(messages, template, tokenizer, train_on, may_part=False)


def _mask(
    messages: Sequence[Message],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    train_on: TrainOn,
    *,
    may_part: bool,
) -> Masked:
    """Return a conversation to train on; see `mask_conversation` and `mask_answers`."""
    _check_contents(messages, template, tokenizer)
    ids_of_pieces: dict[ChatPiece, np.ndarray] = {}

    def ids(count: int, is_prompt: bool) -> np.ndarray:
        return _render(messages[:count], template, tokenizer, is_prompt, ids_of_pieces)

    def length(count: int, is_prompt: bool) -> int:
        what = f"messages 1 to {count}" + " and the prompt of an answer" * is_prompt
        return _length_of_prefix(ids(count, is_prompt), tokens, what, tokenizer)

    tokens = ids(len(messages), False)
    stops = stop_sequences(template, tokenizer)
    marks = _turn_marks(template, tokenizer)
    if marks and messages[-1].role == ANSWER and messages[-1].is_trained:
        first = len(ids(len(messages) - 1, True))
        if not any(_last_end(tokens, first, stop) for stop in stops):
            following = marks[-1] if messages[-1].calls else marks[0]  # a tool, or the user
            tokens = np.append(tokens, np.int32(following))
    weights = np.zeros(len(tokens), np.uint8)
    answers = _answers(messages, is_trained=True)
    left_out = _answers(messages, is_trained=False)
    if train_on == "all":
        weights[1:] = 1
        try:
            for number in left_out:
                weights[length(number, True) : length(number + 1, False)] = 0
        except PrefixError as error:
            raise ConversationError(
                f"messages[{left_out[0]}] is not to be trained on, and data.train_on=all trains"
                f" whole conversations with this template: choose assistant ({error})"
            ) from error
        is_endless = answers and not any(_last_end(tokens, 0, stop) for stop in stops)
        return Masked(tokens, weights, len(answers) if is_endless else 0)
    if train_on == "last":
        answers = [number for number in answers[-1:] if number > max(left_out, default=-1)]
    endless = 0
    for number in answers:
        try:
            start = length(number, True)
        except PrefixError:
            if not may_part:
                raise
            start = max(length(number, False), _common_length(ids(number, True), tokens))
        end = length(number + 1, False)
        places = (_last_end(tokens[:end], start, stop) for stop in stops)
        end_at = max(filter(None, places), default=None)
        if end_at is None and marks and tuple(tokens[end : end + 1].tolist()) in stops:
            end_at = end + 1
        weights[start : end_at or end] = 1
        endless += end_at is None
    return Masked(tokens, weights, endless)


def _render(
    messages: Sequence[Message],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    add_generation_prompt: bool,
    ids_of_pieces: dict[ChatPiece, np.ndarray],
) -> np.ndarray:
    """Return the ids of the pieces; `ids_of_pieces` keeps them for the next prefix."""
    pieces = list(template.pieces(messages, add_generation_prompt=add_generation_prompt))
    return _encode(pieces, tokenizer, ids_of_pieces)


def _pieces_to_continue(messages: Sequence[Message], template: ChatTemplate) -> list[ChatPiece]:
    """Return the pieces up to the end of the content of the last message.

    The place is found by a mark behind the content, as `transformers` does. A template that trims
    contents trims this one too.

    Raises:
        ConversationError: The template does not write the last message.
    """
    *earlier, last = messages
    marked = (*earlier, dataclasses.replace(last, content=last.content + _MARK))
    pieces = list(template.pieces(marked, add_generation_prompt=False))
    mark = _MARK.strip()
    number = next((n for n in reversed(range(len(pieces))) if mark in pieces[n].text), None)
    if number is None:
        raise ConversationError(
            "the template does not write the content of the last message, which is to be continued"
        )
    text = pieces[number].text
    place = text.rindex(mark)
    is_trimmed = not text.startswith(_MARK, place)
    content = text[:place].rstrip() if is_trimmed else text[:place]
    return [*pieces[:number], pieces[number]._replace(text=content)]


def _encode(
    pieces: Sequence[ChatPiece], tokenizer: Tokenizer, ids_of_pieces: dict[ChatPiece, np.ndarray]
) -> np.ndarray:
    """Return the ids of pieces; `ids_of_pieces` keeps those of each."""
    new = [piece for piece in dict.fromkeys(pieces) if piece not in ids_of_pieces]
    ids_of_pieces |= {
        piece: _control_ids(piece, tokenizer) for piece in new if piece.kind != "text"
    }
    texts = [piece for piece in new if piece.kind == "text"]
    encoded = tokenizer.encode_all([piece.text for piece in texts]) if texts else []
    for piece, ids in zip(texts, encoded, strict=True):
        if tokenizer.separator in ids:
            raise ConversationError(
                f"a message spells the separator between documents (id {tokenizer.separator}): "
                "remove it, or leave the conversation out"
            )
        ids_of_pieces[piece] = ids.astype(np.int32)
    return np.concatenate([np.zeros(0, np.int32), *(ids_of_pieces[piece] for piece in pieces)])


def _control_ids(piece: ChatPiece, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of a piece that is no text."""
    if piece.kind in ("begin", "separator"):
        token = tokenizer.begin if piece.kind == "begin" else tokenizer.separator
        return np.array([token], np.int32)
    return tokenizer.encode_controls(piece.text).astype(np.int32)


def _check_contents(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    """Raise a ConversationError if the content of a message would be read as control."""
    for number, message in enumerate(messages):
        for path, text in (("['content']", message.content), *message.further_texts()):
            if control := first_control(text, template, tokenizer):
                raise ConversationError(
                    f"messages[{number}]{path} spells {control!r}, which the template would read as"
                    " control: remove it, or leave the conversation out"
                )


def first_control(text: str, template: ChatTemplate, tokenizer: Tokenizer) -> str | None:
    """Return what a text spells that the template would read as control; None without any.

    Args:
        text: Part of a message, or of what else the template writes.
        template: How turns are written.
        tokenizer: Tokenizer of text.
    """
    if not text:
        return None
    reserved = _list_reserved(template, tokenizer)
    return next((control for control in reserved if control in text), None)


@functools.lru_cache(maxsize=16)
def _list_reserved(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the texts that messages must not spell."""
    return tuple(template.reserved_texts(tokenizer))


def _common_length(ids: np.ndarray, other_ids: np.ndarray) -> int:
    """Return the number of ids at the begin that are the same."""
    size = min(len(ids), len(other_ids))
    differing = np.flatnonzero(ids[:size] != other_ids[:size])
    return int(differing[0]) if len(differing) else size


def _length_of_prefix(
    prefix: np.ndarray, tokens: np.ndarray, what: str, tokenizer: Tokenizer
) -> int:
    """Return the length of a prefix; raise a PrefixError if it is none."""
    at = _common_length(prefix, tokens)
    if at == len(prefix):
        return at
    alone, with_next = (
        f"{tokenizer.spell(ids[at : at + 1])!r} (id {ids[at]})" if at < len(ids) else "the end"
        for ids in (prefix, tokens)
    )
    raise PrefixError(
        f"the template cannot be masked: it writes {what} in another way when more follows. The "
        f"first difference is at token {at}: {alone} alone, {with_next} in the whole conversation. "
        "Choose data.template chatml, or data.train_on last or all"
    )


def _last_end(tokens: np.ndarray, start: int, stop: tuple[int, ...]) -> int | None:
    """Return the place after the last stop sequence behind `start`; None if there is none."""
    for end in range(len(tokens), start + len(stop) - 1, -1):
        if tuple(tokens[end - len(stop) : end].tolist()) == stop:
            return end
    return None
