# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Talks with a model: renders the conversation by its template, and generates the next answer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxmoe.data.chat import ChatTemplate, Message, render, stop_ids
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.generation.text import Sample

Generate = Callable[..., Sample]
"""`Run.generate` of token ids, with `eos_ids`, `stop` and `on_sample`."""


@dataclasses.dataclass(kw_only=True)
class Chat:
    """A conversation, and the model that answers."""

    template: ChatTemplate
    """How turns are written."""
    tokenizer: Tokenizer
    """Tokenizer of the model."""
    generate: Generate
    """Function that continues token ids."""
    messages: tuple[Message, ...] = ()
    """Turns so far; those of the system come first."""

    def answer(
        self,
        text: str,
        on_text: Callable[[str], None] = lambda new: None,
        *,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> str:
        """Return the answer to a message, and add both to the conversation.

        Args:
            text: Message of the user.
            on_text: Called with each new part of the answer; if it raises KeyboardInterrupt, or a
                signal does, the answer ends with what has been generated.
            stop: Strings that end an answer, beside the end of the template.
            **sampling: Further arguments of `Run.generate`.

        Raises:
            ConversationError: The template cannot write the message; it is left out.
        """
        messages = (*self.messages, Message(role="user", content=text))
        ids = render(messages, self.template, self.tokenizer, add_generation_prompt=True)
        end_ids, spelled = answer_ends(self.template, self.tokenizer)
        shown = ""

        def show(sample: Sample) -> None:
            nonlocal shown
            new = sample.text[len(shown) :]
            shown = sample.text
            if new:
                on_text(new)

        # An interrupt ends the answer, and the conversation goes on.
        with contextlib.suppress(KeyboardInterrupt):
            sample = self.generate(
                np.asarray(ids, np.int32),
                eos_ids=end_ids,
                stop=(*stop, *spelled),
                on_sample=show,
                **sampling,
            )
            show(sample)
        self.messages = (*messages, Message(role="assistant", content=shown))
        return shown


def answer_ends(
    template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ids and the texts that end an answer.

    Args:
        template: How turns are written.
        tokenizer: Tokenizer of the model.
    """
    ids = stop_ids(template, tokenizer)
    end = template.end
    if end is None or end.kind != "control" or not end.text:
        return ids, ()
    return ids, (end.text,)
