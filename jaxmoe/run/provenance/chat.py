# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Opens a conversation with a run, by the template that it was trained with."""

from __future__ import annotations

from typing import Any

from jaxmoe.data.chat import Message, TemplateName, template_of
from jaxmoe.data.tokenizer import BytesConfig, ByteTokenizer
from jaxmoe.errors import configuration_errors
from jaxmoe.generation.chat import Chat
from jaxmoe.run.provenance.kept_tokenizer import own_data


def open_chat(run: Any, *, system: str | None = None, template: TemplateName | None = None) -> Chat:
    """Return a conversation with a run or a Hugging Face model; see `Chat.answer`.

    Args:
        run: The opened `Run`.
        system: Message of the system; none when None.
        template: How turns are written; when None that of the training data, or of the tokenizer.

    Raises:
        ConfigurationError: The model has no tokenizer of text, or no template.
    """
    with configuration_errors():
        source: Any = run.text_source
        data: Any = own_data(run.config, run.directory)
        config = getattr(data, "tokenizer", None) or BytesConfig()
        tokenizer = getattr(source, "tokenizer", None)
        has_text = config.is_text if tokenizer is not None else source.bytes_per_token == 1.0
        if not has_text:
            raise ValueError(f"run.directory={run.directory.path} has tokens without text")
        usual = "tokenizer" if config.directory is not None else None
        name = template or getattr(data, "template", None) or usual
        if name is None:
            raise ValueError(
                f"run.directory={run.directory.path} was not trained on conversations, and its"
                " tokenizer has no chat_template: give --template chatml or plain, or train it with"
                " data:chat"
            )
        found = template_of(name, config)
    tokenizer = tokenizer or ByteTokenizer()
    messages = () if system is None else (Message(role="system", content=system),)
    return Chat(template=found, tokenizer=tokenizer, generate=run.generate, messages=messages)
