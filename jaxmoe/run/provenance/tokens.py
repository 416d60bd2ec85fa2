# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gives the data of a new run the tokens of its model, and opens conversations with a run.

    model                          data that take a tokenizer      other data
    a tokenizer.json, or bytes     the model's own                 the model's own, or refused
    token ids                      ids                             as they are
    a synthetic language           refused unless one is named     as they are

The separator is the model's end of text. Conversations are written as the model was trained to read
them: by the template of its data, else by the chat_template beside its tokenizer.json. The ids that
end its texts are kept with the run.

A tokenizer that a command line names stays, whatever the model's is. The run says what its ids mean
to the embeddings (`describe_other_tokens`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from typing import Any

import numpy as np

from jaxmoe.checkpoint.huggingface.hub import is_huggingface
from jaxmoe.checkpoint.huggingface.tokenizer import TOKENIZER
from jaxmoe.data import Source, SourceKind
from jaxmoe.data.chat import ChatTemplate, Message, TemplateName, template_of, tokenizer_template
from jaxmoe.data.tokenizer import BytesConfig, ByteTokenizer, Tokenizer, TokenizerConfig
from jaxmoe.errors import configuration_errors
from jaxmoe.generation.chat import Chat
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import RunPlan
from jaxmoe.run.provenance.saved import keep_generation, keep_tokenizer, own_data, saved_config

logger = logging.getLogger(__name__)


_BORDERS = ("begin", "separator")
"""Fields of fingerprints that do not change what an id means."""


def model_data(path: str | os.PathLike[str]) -> SourceKind:
    """Return the data of a run or a Hugging Face model, with the tokenizer that it keeps.

    Args:
        path: Run directory, or directory of a Hugging Face model.

    Raises:
        ValueError: There is no such model.
    """
    config = saved_config(path)
    return config.data if is_huggingface(path) else own_data(config, RunDirectory(path))


def missing_text(path: str | os.PathLike[str]) -> str | None:
    """Return why a Hugging Face model reads no text, and the way out; None where it does.

    Args:
        path: Run directory, or directory of a Hugging Face model.
    """
    place = pathlib.Path(path)
    if not is_huggingface(path) or (place / TOKENIZER).exists():
        return None
    return (
        f"{path} has no {TOKENIZER}, so that its text is unknown here and data are token ids. If it"
        " has another file of its tokenizer, write this one with transformers:"
        f" AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
    )


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
        template = template_name(model)
        if template not in (None, data.template):
            changes["template"] = template
    return dataclasses.replace(data, **changes) if changes else data


def template_name(data: Any) -> TemplateName | None:
    """Return how the conversations of a model are written; None where it knows no template.

    Args:
        data: Data of the model, as of `model_data`.
    """
    template = getattr(data, "template", None)
    if template is None and _brings_template(data.tokenizer):
        return "tokenizer"
    return template


def with_named_template(data: Any) -> Any:
    """Return a data config that writes conversations by the template of its tokenizer, if any.

    Args:
        data: Data whose tokenizer was named, and whose template was not.
    """
    if not hasattr(data, "template") or not _brings_template(data.tokenizer):
        return data
    return dataclasses.replace(data, template="tokenizer")


def check_model_tokens(data: Any, model: Any, *, has_tokenizer: bool = False) -> None:
    """Refuse data whose ids mean something else than those of a model.

    Args:
        data: Data of a new run.
        model: Data of the model, as of `model_data`.
        has_tokenizer: Whether the tokenizer of `data` was named, and is taken whatever it is.

    Raises:
        ValueError: The tokenizers differ; names both.
        DataError: A tokenizer cannot be read.
    """
    tokenizer = data.tokenizer
    model_tokenizer = model.tokenizer
    if tokenizer == model_tokenizer or has_tokenizer or not data.traits.has_rows:
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
    return {name: value for name, value in fingerprint.items() if name not in _BORDERS}


def keep_tokens(directory: RunDirectory, plan: RunPlan, source: Source) -> None:
    """Keep the tokenizer of a run, and what ends a text of the model that it begins with.

    Warns of other tokens than those of the model.

    Args:
        directory: Run directory, held by this process.
        plan: Plan of the run.
        source: Data of the run.

    Raises:
        ValueError: A directory cannot be read or written.
    """
    keep_tokenizer(directory, plan.config, source)
    text = describe_other_tokens(plan, source)
    if text is None:
        keep_generation(directory, plan.config)
    else:
        logger.warning("%s", text)


def describe_other_tokens(plan: RunPlan, source: Source) -> str | None:
    """Return what the ids of a run mean to the embeddings of the model that it begins with.

    Args:
        plan: Plan of the run.
        source: Data of the run.

    Returns:
        A text; None where the ids mean what they did, or nothing is known of them.

    Raises:
        ValueError: The tokenizer of the model cannot be read.
    """
    path = plan.config.checkpoint.initial_path
    if path is None or not (is_huggingface(path) or RunDirectory(path).has_config()):
        return None
    data = plan.config.data
    model_config = model_data(path).tokenizer
    has_ids = data.tokenizer is not None and not data.tokenizer.is_text
    if data.tokenizer == model_config or has_ids or not data.traits.has_rows:
        return None
    if model_config is None or not model_config.is_text or model_config.is_trained:
        if data.tokenizer is None:
            return None
        return (
            f"{_words(data.tokenizer)} is taken to be the tokenizer of checkpoint.initial.path="
            f"{path}, which keeps none ({_words(model_config)}): if another made its ids, its"
            " embeddings stand for other texts"
        )
    num_same = 0
    if data.tokenizer is not None:
        tokenizer = getattr(source, "tokenizer", None) or ByteTokenizer()
        num_same = _count_same(tokenizer, model_config.build(lambda: (), pathlib.Path()))
    if num_same == source.vocab_size:
        return None
    trained = {row.path.partition(":")[0] for row in plan.table.trained_rows}
    tables = [row.path for row in plan.table if row.declaration.role in ("embedding", "head")]
    training = (
        "They are trained here, from values that stand for other texts."
        if trained.issuperset(tables)
        else "They stay as they are, for model.adapter freezes them: adapter:select trains them."
    )
    return (
        f"data:{data.name} has the tokens of {_words(data.tokenizer)}, and checkpoint.initial.path="
        f"{path} those of {_words(model_config)}: {num_same:,} of {source.vocab_size:,} ids have"
        " the same text in both. The others have embeddings and logits of other texts, or of none."
        f" {training} Without data.tokenizer the run takes the tokenizer of the model"
    )


def _count_same(tokenizer: Tokenizer, model_tokenizer: Tokenizer) -> int:
    """Return the number of ids that have the same text in both vocabularies."""
    size = min(tokenizer.vocab_size, model_tokenizer.vocab_size)
    return sum(_spell(tokenizer, token) == _spell(model_tokenizer, token) for token in range(size))


def _spell(tokenizer: Tokenizer, token: int) -> bytes:
    return tokenizer.token_bytes(token) or tokenizer.spell(np.array([token])).encode()


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
