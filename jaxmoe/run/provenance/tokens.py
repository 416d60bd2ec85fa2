# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gives the data of a new run the tokens of its model, and opens conversations with a run.

    model                          data that take a tokenizer      other data
    a tokenizer.json, or bytes     the model's own                 the model's own, or refused
    token ids                      ids                             as they are
    a synthetic language           refused unless one is named     as they are

The separator is the model's end of text. Conversations are written as the model was trained to read
them: by the template of its data, else by the chat_template beside its tokenizer.json.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from jaxmoe.checkpoint.huggingface.hub import is_huggingface
from jaxmoe.data import SourceKind
from jaxmoe.data.chat import ChatTemplate, Message, TemplateName, template_of, tokenizer_template
from jaxmoe.data.tokenizer import BytesConfig, ByteTokenizer, Tokenizer, TokenizerConfig
from jaxmoe.errors import configuration_errors
from jaxmoe.generation.chat import Chat
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.provenance.saved import own_data, saved_config


def model_data(path: str | os.PathLike[str]) -> SourceKind:
    """Return the data of a run or a Hugging Face model, with the tokenizer that it keeps.

    Args:
        path: Run directory, or directory of a Hugging Face model.

    Raises:
        ValueError: There is no such model.
    """
    config = saved_config(path)
    return config.data if is_huggingface(path) else own_data(config, RunDirectory(path))


def with_model_tokens(
    data: Any, model: Any, *, has_tokenizer: bool = False, has_template: bool = False
) -> Any:
    """Return a data config that is read by the tokenizer and the chat template of a model.

    Args:
        data: Data of a new run.
        model: Data of the model, as of `model_data`.
        has_tokenizer: Whether the tokenizer of `data` was named, and stays.
        has_template: Whether the template of `data` was named, and stays.
    """
    changes: dict[str, Any] = {}
    tokenizer = model.tokenizer
    if data.takes_tokenizer and tokenizer is not None and not has_tokenizer:
        changes["tokenizer"] = tokenizer
    if hasattr(data, "template") and not has_template and not has_tokenizer:
        template = getattr(model, "template", None)
        if template is None and _brings_template(tokenizer):
            template = "tokenizer"
        if template not in (None, data.template):
            changes["template"] = template
    return dataclasses.replace(data, **changes) if changes else data


def check_model_tokens(data: Any, model: Any) -> None:
    """Refuse data whose ids mean something else than those of a model.

    Args:
        data: Data of a new run.
        model: Data of the model, as of `model_data`.

    Raises:
        ValueError: The tokenizers differ; names both.
        DataError: A tokenizer cannot be read.
    """
    tokenizer = data.tokenizer
    model_tokenizer = model.tokenizer
    if tokenizer == model_tokenizer or not data.traits.has_rows:
        return
    way_out = (
        "choose data:files, data:chat, data:mixture or data:huggingface, which take the model's own"
        if model_tokenizer is not None and model_tokenizer.is_text
        else "name the tokenizer that made its ids with data.tokenizer:file --data.tokenizer.path"
        " FILE, or give token ids by data.tokenizer:ids"
    )
    if model_tokenizer is None or not model_tokenizer.is_text:
        # Ids without text: a tokenizer that is named may be the one that made them.
        if tokenizer is None or not tokenizer.is_bytes:
            return
    elif tokenizer is not None:
        if not tokenizer.is_text:  # ids that were made by the model's tokenizer
            return
        if data.takes_tokenizer:
            way_out = "leave data.tokenizer out"
        if _identity(tokenizer) == _identity(model_tokenizer):
            return
    raise ValueError(
        f"data:{data.name} has the tokens of {_words(tokenizer)}, and the model to begin with has"
        f" those of {_words(model_tokenizer)}: the same ids mean other texts; {way_out}"
    )


def _identity(tokenizer: TokenizerConfig) -> dict[str, Any] | None:
    """Return what tells tokenizers apart but for the separator; None for one yet to be trained."""
    if tokenizer.is_trained:
        return None
    fingerprint = tokenizer.build(lambda: (), pathlib.Path()).fingerprint()
    return {name: value for name, value in fingerprint.items() if name != "separator"}


def _brings_template(tokenizer: TokenizerConfig | None) -> bool:
    file = None if tokenizer is None else tokenizer.file
    return file is not None and tokenizer_template.has_template(file.parent)


def _words(tokenizer: TokenizerConfig | None) -> str:
    if tokenizer is None:
        return "a synthetic language"
    file = getattr(tokenizer, "path", "")
    return f"data.tokenizer:{tokenizer.name}" + (f" ({file})" if file else "")


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
        chat, tokenizer = chat_format(run.text_source, run.config, run.directory, template)
    messages = () if system is None else (Message(role="system", content=system),)
    return Chat(template=chat, tokenizer=tokenizer, generate=run.generate, messages=messages)


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
    default_template = "tokenizer" if kind.file is not None else None
    name = name or getattr(data, "template", None) or default_template
    if name is None:
        raise ValueError(
            f"run.directory={directory.path} was not trained on conversations, and its"
            " tokenizer has no chat_template: give --template chatml or plain, or train it with"
            " data:chat"
        )
    return template_of(name, kind), tokenizer or ByteTokenizer()
