# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the tokenizer files beside weights: tokenizer.json and its companions.

    data                        written                             read back as
    bytes, the corpus           a byte-level tokenizer.json         bytes
    a tokenizer.json            that file and its companions        that file
    a vocabulary trained here   its tokenizer.json                  that file
    ids, synthetic languages    none: there is no text

The byte-level tokenizer has the 256 bytes under GPT-2's characters, no merges and no special
tokens: the id of a byte is the byte. Byte 0, which separates documents here, is not a special
token: a special token has a spelling, and text with that spelling would get other ids.

The separator of a subword tokenizer is a special token. `transformers` maps text that spells it to
the token; this library treats it as text. Sources here put the separator before a prompt, which
begins a document; tokenizer.json does not.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxmoe.checkpoint.huggingface.paths import plain_file, read_object
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.data import CorpusConfig, SourceKind, TextOnlyConfig
from jaxmoe.data.chat import MORE_TEMPLATES, answer_end_ids, read_built_in, template_of
from jaxmoe.data.tokenizer import FileConfig, IdsConfig, SubwordTokenizer
from jaxmoe.data.tokenizer.byte_level import CHARACTERS
from jaxmoe.json_bounds import parse_json

TOKENIZER = "tokenizer.json"
_MAX_BYTES, _MAX_VALUES = 1 << 28, 1 << 24  # an object or a list for each merge
GENERATION = "generation_config.json"
_SETTINGS = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_JINJA = "chat_template.jinja"
_BESIDE = (
    _SETTINGS,
    _SPECIAL,
    "added_tokens.json",
    _JINJA,
    "vocab.json",
    "merges.txt",
)


class TokenizerFiles(NamedTuple):
    """Tokenizer files of some data."""

    texts: dict[str, str]
    """Contents by file name; empty if the data is not text."""
    separator: int | None
    """Id that ends a document."""
    words: str
    """Description in one line."""
    ends: tuple[int, ...] = ()
    """Ids that end an answer of conversations; none of other data."""


def tokenizer_files(data: SourceKind, *, seed: int = 0) -> TokenizerFiles:
    """Return the tokenizer files of a run's data.

    Args:
        data: Data of the run.
        seed: Seed of the run.

    Raises:
        DataError: The tokenizer cannot be read, or it was trained on files that are missing.
    """
    kind = data.tokenizer
    if kind is None or not kind.is_text:
        return TokenizerFiles({}, None, "there is no tokenizer: the data is token ids, not text")
    if kind.is_bytes:
        texts = {TOKENIZER: _dump(byte_tokenizer()), _SETTINGS: _dump(_settings())}
        sentence = "tokens are the bytes of UTF-8, documents are separated by byte 0"
        return TokenizerFiles(texts | _template(data, "\0", "\0"), 0, sentence)
    if kind.is_trained:
        source: Any = data.build(seed)
        read = source.tokenizer  # read from the cache, or trained again
    else:
        read = kind.build(lambda: (), pathlib.Path())
    assert isinstance(read, SubwordTokenizer)
    sentence = f"documents are separated by {read.separator_token!r} (id {read.separator})"
    texts = tokenizer_texts(read, is_trained=kind.is_trained)
    texts |= _template(data, read.separator_token, read.begin_token)
    return TokenizerFiles(texts, read.separator, sentence, answer_end_ids(data, read))


def _template(data: SourceKind, separator: str, begin: str) -> dict[str, str]:
    """Return the file of the chat template by which the data writes conversations, if it does.

    That of the tokenizer is among its companions, with others beside it.
    """
    if (name := data.traits.template) in (None, "tokenizer"):
        return {}
    assert data.tokenizer is not None  # conversations are text
    return {_JINJA: template_of(name, data.tokenizer).jinja(separator, begin)}


def tokenizer_texts(tokenizer: SubwordTokenizer, *, is_trained: bool) -> dict[str, str]:
    """Return the files of a tokenizer by name.

    Args:
        tokenizer: Tokenizer that was read from a file.
        is_trained: Whether it was trained here; if not, its companions are beside its file.
    """
    texts = {TOKENIZER: tokenizer.content}
    if not is_trained:
        texts |= _texts_beside(tokenizer.path.parent)
    texts.setdefault(_SETTINGS, _dump(_settings(eos_token=tokenizer.separator_token)))
    return texts


def read_tokenizer_files(directory: pathlib.Path) -> dict[str, str]:
    """Return the tokenizer files of a directory by name; empty without a tokenizer.json.

    Raises:
        CheckpointError: A file is not a plain file inside the directory, or cannot be read.
    """
    if not os.path.lexists(directory / TOKENIZER):
        return {}
    names = (TOKENIZER, *_names_beside(directory))
    return {name: _read(plain_file(directory, name)) for name in names}


def is_byte_tokenizer(text: str) -> bool:
    """Return whether a tokenizer.json maps every byte to its value, and does nothing else."""
    try:
        content = parse_json(text, max_values=_MAX_VALUES)
        before = content["pre_tokenizer"]
        ours = byte_tokenizer()
        return (
            content["model"]["vocab"] == ours["model"]["vocab"]
            and not content["model"]["merges"]
            and not content.get("added_tokens")
            and not content.get("normalizer")
            and before["type"] == "ByteLevel"
            and not before["add_prefix_space"]
        )
    except (ValueError, KeyError, TypeError):
        return False


def read_generation(directory: pathlib.Path) -> dict[str, Any]:
    """Return the fields of generation_config.json; empty without the file.

    Args:
        directory: Directory of the model.

    Raises:
        CheckpointError: It cannot be read, is no object, or names ends that are no ids.
    """
    if not os.path.lexists(directory / GENERATION):
        return {}
    file = plain_file(directory, GENERATION)
    fields = read_object(file)
    ids = fields.get("eos_token_id")
    several = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in several):
        raise CheckpointError(f"{file}: eos_token_id={ids!r} must be an id, or a list of ids")
    return fields


def eos_ids(fields: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a text, as `transformers` takes them: one, several or none.

    Args:
        fields: Fields of config.json.
        generation: Fields of generation_config.json, whose ids hold where it names any.
    """
    ids = generation.get("eos_token_id")
    ids = fields.get("eos_token_id") if ids is None else ids
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def separator_token(text: str, token_id: Any) -> str | None:
    """Return how a tokenizer.json spells an id, such as the eos_token_id of a config.

    Args:
        text: Content of the file.
        token_id: Id, or a list whose first id is used.
    """
    token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
    try:
        content = parse_json(text, max_values=_MAX_VALUES)
        names = {entry["id"]: entry["content"] for entry in content.get("added_tokens") or ()}
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            names = {number: name for name, number in vocabulary.items()} | names
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{TOKENIZER} is not a tokenizer: {error!r}") from error
    return names.get(token_id)


def bundled_data(directory: pathlib.Path, fields: Mapping[str, Any]) -> SourceKind:
    """Return the data config of a model that brings no data: its tokenizer, and no rows.

    A model of bytes has the embedded corpus, which is in bytes, unless it was exported with a chat
    template. Without a tokenizer.json, text is numbers: token ids.

    Args:
        directory: Directory of the model.
        fields: Fields of its config.json.

    Raises:
        CheckpointError: The tokenizer.json cannot be read.
    """
    texts = read_tokenizer_files(directory)
    if TOKENIZER not in texts:
        return TextOnlyConfig(tokenizer=IdsConfig(vocab_size=fields["vocab_size"]))
    if is_byte_tokenizer(texts[TOKENIZER]):
        template = read_built_in(texts.get(_JINJA, ""), None)
        return CorpusConfig() if template is None else TextOnlyConfig(template=template.name)
    return TextOnlyConfig(tokenizer=own_tokenizer(directory, texts[TOKENIZER], fields))


def own_tokenizer(directory: pathlib.Path, text: str, fields: Mapping[str, Any]) -> FileConfig:
    """Return the config of a model's tokenizer, with its end of text as separator.

    Documents begin as `transformers` begins a text, if that adds one token before it.

    Args:
        directory: Directory of the model.
        text: Content of its tokenizer.json.
        fields: Fields of its config.json.
    """
    end = fields.get("eos_token_id")
    end = read_generation(directory).get("eos_token_id") if end is None else end
    separator = separator_token(text, end) or _end_token(directory)
    begin = _begin_token(text)
    return FileConfig(path=str(directory / TOKENIZER), separator=separator, begin=begin)


def _end_token(directory: pathlib.Path) -> str | None:
    """Return the eos_token of the settings of a tokenizer or of its map, if one names it."""
    for name in (_SETTINGS, _SPECIAL):
        if not (directory / name).is_file():
            continue
        token = read_object(plain_file(directory, name)).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _begin_token(text: str) -> str | None:
    """Return the token that a tokenizer.json puts before a text, if that is one.

    Args:
        text: Content of the file.
    """
    try:
        processor = parse_json(text, max_values=_MAX_VALUES).get("post_processor") or {}
        for part in processor.get("processors") or (processor,):
            single = part.get("single") or ()
            before = list(itertools.takewhile(lambda piece: "SpecialToken" in piece, single))
            if len(before) == 1:
                return str(before[0]["SpecialToken"]["id"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{TOKENIZER} has no post_processor that is read: {error!r}"
        ) from error
    return None


def byte_tokenizer() -> dict[str, Any]:
    """Return the tokenizer.json of bytes."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [],
        "pre_tokenizer": level | {"use_regex": False},
        "decoder": level | {"use_regex": False},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token")),
            **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": {character: byte for byte, character in enumerate(CHARACTERS)},
            "merges": [],
        },
    }


def _settings(**tokens: str) -> Mapping[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokens,
    }


def _names_beside(directory: pathlib.Path) -> list[str]:
    """Return the names of the companions of a tokenizer.json that a directory has."""
    more = sorted(path.name for path in (directory / MORE_TEMPLATES).glob("*.jinja"))
    names = (*_BESIDE, *(f"{MORE_TEMPLATES}/{name}" for name in more))
    return [name for name in names if os.path.lexists(directory / name)]


def _texts_beside(directory: pathlib.Path) -> dict[str, str]:
    names = _names_beside(directory)
    return {name: _read(directory / name) for name in names if (directory / name).is_file()}


def _read(path: pathlib.Path) -> str:
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise CheckpointError(
                f"{path} has {size} bytes, at most {_MAX_BYTES} are read: download it again"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _dump(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
