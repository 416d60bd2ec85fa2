# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of data: the first batches of every source, tokenizer and packing, and held-out batches."""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints
from unittest import mock

import numpy as np

from tests.support.hashes.digests import digest_of_record, digest_of_tree
from tests.support.hashes.rows import Row

LENGTH, BATCH = 32, 4


def rows() -> Iterator[tuple[str, Row]]:
    """Yield the rows."""
    from jaxmoe.contrib.ensembles.partition import ClusterPartConfig
    from jaxmoe.data import DATA_SOURCES
    from jaxmoe.data.tokenizer import TOKENIZERS

    for name in DATA_SOURCES:
        if name not in _WITHOUT_ROWS:
            yield f"data/{name}", functools.partial(_batches, {}, name)
    for name in TOKENIZERS:
        yield f"tokenizer/{name}", functools.partial(_tokenizer, name)
    for packing in get_args(get_type_hints(DATA_SOURCES["files"])["packing"]):
        if packing != "levels":  # executions.py
            fields = {"packing": packing}
            yield f"packing/{packing}", functools.partial(_batches, fields, "files")
    for train_on in ("assistant", "all"):
        yield (
            f"data/chat_on_{train_on}",
            functools.partial(_batches, {"train_on": train_on}, "chat"),
        )
    parts = {"partition": ClusterPartConfig(part="1/2")}
    yield "data/partition", functools.partial(_batches, parts, "language_mixture")
    yield "data/two_hosts", _two_hosts


_WITHOUT_ROWS = {
    "huggingface": "needs a package that is not installed",
    "tokenizer_only": "has no rows",
}


def _texts(directory: pathlib.Path) -> pathlib.Path:
    """Write documents of many lengths, also of other scripts."""
    path = directory / "texts.jsonl"
    texts = [f"document {i} " + f"w\u00f6rd{i % 5} " * (i * 7 % 23) for i in range(120)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def _fields(name: str, directory: pathlib.Path) -> dict[str, Any]:
    """Return what a source must be told."""
    if name == "files":
        return {"path": (str(_texts(directory)),)}
    if name == "mixture":
        (directory / "other.txt").write_text("another text, which repeats. " * 300)
        return {"mix": (f"a=0.75:{_texts(directory)}", f"b=0.25:{directory / 'other.txt'}")}
    if name == "chat":
        path = directory / "chat.jsonl"
        path.write_text("\n".join(json.dumps(_conversation(number)) for number in range(60)))
        return {"path": (str(path),)}
    return {}


def _conversation(number: int) -> dict[str, Any]:
    turns = [("user", f"What is {number}?"), ("assistant", f"It is ({number}).")] * (1 + number % 3)
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _source(name: str, directory: pathlib.Path, **fields: Any) -> Any:
    from jaxmoe.data import DATA_SOURCES

    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(directory / "cache")):
        return DATA_SOURCES[name](**_fields(name, directory), **fields).build(0)


def _hashes(source: Any) -> dict[str, str]:
    """Return the hashes of the batches of three steps, of a late one, and of held-out rows."""
    from jaxmoe.data import Loader, evaluation_batches

    loader = Loader(source, batch_size=BATCH, sequence_length=LENGTH, seed=0)
    batches = [dict(loader.batch(step).arrays()) for step in (0, 1, 2, 1000)]
    sizes = {"batch_size": 2, "sequence_length": LENGTH, "num_batches": 1}
    held_out = evaluation_batches(source, **sizes)
    try:
        evaluated = [dict(batch.arrays()) for batch in held_out]
    finally:
        held_out.close()
    return {"batches": digest_of_tree(batches), "held-out batches": digest_of_tree(evaluated)}


def _batches(fields: dict[str, Any], name: str, directory: pathlib.Path) -> dict[str, str]:
    return _hashes(_source(name, directory, **fields))


def _tokenizer(name: str, directory: pathlib.Path) -> dict[str, str]:
    """A source with the tokenizer, ids of a text and the text of ids."""
    from jaxmoe.data import DATA_SOURCES
    from jaxmoe.data.tokenizer import TOKENIZERS
    from tests.support.huggingface_directories import END, tokenizer_json

    config = TOKENIZERS[name]
    if name == "ids":
        ids = np.random.default_rng(0).integers(0, 300, 6000).astype(np.uint16)
        path = directory / "ids.bin"
        ids.tofile(path)
        tokenizer = config(vocab_size=300, separator=0)
        return _hashes(DATA_SOURCES["files"](path=(str(path),), tokenizer=tokenizer).build(0))
    options: dict[str, Any] = {"vocab_size": 300} if name == "trained" else {}
    if name == "file":
        path = directory / "tokenizer.json"
        path.write_text(json.dumps(tokenizer_json()))
        options = {"path": str(path), "separator": END}
    source = _source("files", directory, tokenizer=config(**options))
    text = "w\u00f6rd 12, document"
    ids = [int(token) for token in source.encode(text)]
    return _hashes(source) | {"tokens": digest_of_record([ids, source.decode(np.asarray(ids))])}


def _two_hosts(directory: pathlib.Path) -> dict[str, str]:
    """The rows that each of two processes reads."""
    from jaxmoe.data import Loader

    source = _source("files", directory)
    parts = []
    for process in range(2):
        options = {"process_index": process, "process_count": 2}
        loader = Loader(source, batch_size=BATCH, sequence_length=LENGTH, seed=0)
        parts.append(dict(loader.batch(3, **options).arrays()))
    return {"batches": digest_of_tree(parts)}
