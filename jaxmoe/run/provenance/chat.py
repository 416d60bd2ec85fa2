# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Opens a conversation with a run, by the template that it was trained with."""

from __future__ import annotations

from typing import Any

from jaxmoe.data.chat import ChatTemplate, Message, TemplateName, template_of
from jaxmoe.data.tokenizer import BytesConfig, ByteTokenizer, Tokenizer
from jaxmoe.errors import configuration_errors
from jaxmoe.generation.chat import Chat
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
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
        found, tokenizer = chat_format(run.text_source, run.config, run.directory, template)
    messages = () if system is None else (Message(role="system", content=system),)
    return Chat(template=found, tokenizer=tokenizer, generate=run.generate, messages=messages)


def chat_format(
    source: Any, config: PretrainConfig, directory: RunDirectory, name: TemplateName | None
) -> tuple[ChatTemplate, Tokenizer]:
    """Return the template and the tokenizer of conversations with a run.

    Args:
        source: Data of the run, or its tokens alone.
        config: Configuration of the run.
        directory: Run directory, or directory of a Hugging Face model.
        name: How turns are written; when None that of the training data, or of the tokenizer.

    Raises:
        ValueError: The model has no tokenizer of text, or no template.
    """
    data: Any = own_data(config, directory)
    kind = getattr(data, "tokenizer", None) or BytesConfig()
    tokenizer = getattr(source, "tokenizer", None)
    has_text = kind.is_text if tokenizer is not None else source.bytes_per_token == 1.0
    if not has_text:
        raise ValueError(f"run.directory={directory.path} has tokens without text")
    usual = "tokenizer" if kind.directory is not None else None
    name = name or getattr(data, "template", None) or usual
    if name is None:
        raise ValueError(
            f"run.directory={directory.path} was not trained on conversations, and its"
            " tokenizer has no chat_template: give --template chatml or plain, or train it with"
            " data:chat"
        )
    return template_of(name, kind), tokenizer or ByteTokenizer()
