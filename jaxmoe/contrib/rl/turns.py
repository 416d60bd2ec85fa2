# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the prompts of a task as conversations, by the chat template of the model.

    17+5=   ->   <|im_start|>user\\n17+5=<|im_end|>\\n<|im_start|>assistant\\n

An answer ends where the template ends an answer, so that a model that was trained on conversations
reads and writes what it was trained on.
"""

from __future__ import annotations

import numpy as np

from jaxmoe.data import Source
from jaxmoe.data.chat import (
    ChatTemplate,
    ConversationError,
    Message,
    TemplateName,
    render,
    template_of,
)
from jaxmoe.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerConfig
from jaxmoe.generation.chat import answer_ends
from pallas_kernels.array_types import Int


class TurnCodec:
    """Encodes a prompt as the turn of a user that waits for its answer; decodes as the source does.

    Args:
        source: Data of the run.
        template: How turns are written.
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, source: Source, template: ChatTemplate, tokenizer: Tokenizer):
        self._source = source
        self._template = template
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, source: Source, kind: TokenizerConfig | None, name: TemplateName) -> TurnCodec:
        """Return the codec of a run.

        Args:
            source: Data of the run.
            kind: Config of its tokenizer; None for a language of ids.
            name: How turns are written.

        Raises:
            ValueError: The tokens have no text, or the tokenizer has no template.
        """
        if kind is None or not kind.is_text:
            raise ValueError(
                f"rl.template={name} writes prompts as text, and the tokens of this run have none:"
                " set rl.template to None"
            )
        tokenizer = getattr(source, "tokenizer", None) or ByteTokenizer()
        return cls(source, template_of(name, kind), tokenizer)

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the token ids of a prompt.

        Args:
            text: What the user says.

        Raises:
            ConversationError: It spells a text that the template reads as control.
        """
        turns = (Message("user", text),)
        try:
            return render(turns, self._template, self._tokenizer, add_generation_prompt=True)
        except ConversationError as error:
            raise ConversationError(
                f"{error}. Prompts that are written as turns already need rl.template=None"
            ) from error

    def decode(self, tokens: Int[np.ndarray, " S"]) -> str:
        """Return the text of token ids.

        Args:
            tokens: Token ids.
        """
        return self._source.decode(tokens)

    @property
    def ends(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Ids and texts that end an answer."""
        return answer_ends(self._template, self._tokenizer)
