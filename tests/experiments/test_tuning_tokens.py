# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The first row of a fine-tuning has the ids of the model's tokenizer, whatever model and data."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import finetune
from experiments.recipes.tiny import tiny
from jaxmoe.configs import to_json
from jaxmoe.data import ChatConfig, CorpusConfig, FilesConfig, MarkovConfig
from jaxmoe.data.chat import Message, TemplateName, render, template_of
from jaxmoe.data.text_only import encode_document
from jaxmoe.data.tokenizer import ByteTokenizer, FileConfig, SubwordTokenizer, TrainedConfig
from jaxmoe.data.tokenizer.subword import SEPARATOR
from tests.support.huggingface_directories import END, tokenizer_json, write_model

CORPUS = CorpusConfig()
JINJA = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
TEXTS = [f"the quick and the {number}" for number in range(30)]
TRAINED = TrainedConfig(vocab_size=300)
RUNS = {
    "bytes": CORPUS,
    "conversations of bytes": ChatConfig(path=("a.jsonl",), template="plain"),
    "a trained vocabulary": FilesConfig(path=("a.txt",), tokenizer=TRAINED),
    "a tokenizer that has moved": FilesConfig(
        path=("a.txt",), tokenizer=FileConfig(path="gone/tokenizer.json", separator=END)
    ),
    "conversations": ChatConfig(path=("a.jsonl",), tokenizer=TRAINED),
}
ENDS = dict.fromkeys(RUNS, SEPARATOR) | {"a tokenizer that has moved": END, "Hugging Face": END}
TEMPLATES: dict[str, TemplateName] = {
    "conversations of bytes": "plain",
    "Hugging Face": "tokenizer",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of runs, with a config and the tokenizer that they keep, and of a model."""
    folder = tmp_path_factory.mktemp("models")
    for name, data in RUNS.items():
        (place := folder / name / "tokenizer").mkdir(parents=True)
        config = dataclasses.replace(tiny(), data=data)
        (folder / name / "config.json").write_text(json.dumps(to_json(config)))
        if "bytes" not in name:
            _write_tokenizer(place, ENDS[name])
    _ = write_model(folder / "Hugging Face")
    _write_tokenizer(folder / "Hugging Face", END)
    (folder / "Hugging Face" / "chat_template.jinja").write_text(JINJA)
    return folder


def _write_tokenizer(place, end):
    (place / "tokenizer.json").write_text(json.dumps(tokenizer_json()).replace(END, end))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in TEXTS))
    chats = [{"prompt": line, "completion": f"and the {line}"} for line in TEXTS]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


DATA = {
    "files": ("--data.path", "{texts}/a.jsonl"),
    "chat": ("data:chat", "--data.path", "{texts}/chats.jsonl"),
    "mixture": ("data:mixture", "--data.mix", "one=1:{texts}/a.jsonl"),
}


def parsed(model, *words):
    where = ["--checkpoint.initial.path", str(model), *words]
    start = finetune.finetune_config(str(model))
    return finetune.parse_tuning(start, where, "finetune", "about")


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("name", [*RUNS, "Hugging Face"])
def test_the_first_row_has_the_ids_of_the_models_tokenizer(name, kind, models, texts, tmp_path):
    words = [word.format(texts=texts) for word in DATA[kind]]
    if name.startswith("conversations") and kind == "files":
        words = ["data:files", *words]
    config = parsed(models / name, *words, "--data.cache", str(tmp_path))
    tokenizer, place = ByteTokenizer(), models / name
    if "bytes" not in name:
        place = place if name == "Hugging Face" else place / "tokenizer"
        tokenizer = SubwordTokenizer(place / "tokenizer.json", ENDS[name])
    row = config.data.build(0).row("train", 0, 256).tokens
    if kind == "chat":
        template = template_of(TEMPLATES.get(name, "chatml"), FileConfig(path=str(place)))
        documents = [
            render(
                (Message("user", text), Message("assistant", f"and the {text}")),
                template,
                tokenizer,
                add_generation_prompt=False,
            )
            for text in TEXTS
        ]
    else:
        documents = [encode_document(tokenizer, text) for text in TEXTS]
    assert any(np.array_equal(row[: len(ids)], ids[: len(row)]) for ids in documents)


REFUSED = {
    "leave data.tokenizer out": (
        "a trained vocabulary",
        ("data:chat", "data.tokenizer:trained", "--data.path", "chats.jsonl"),
    ),
    "data:corpus has the tokens of data.tokenizer:bytes": ("Hugging Face", ("data:corpus",)),
    "data:markov has the tokens of a synthetic language": ("bytes", ("data:markov",)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_data_of_other_ids_is_refused(message, models, capsys):
    name, words = REFUSED[message]
    with pytest.raises(SystemExit) as ended:
        parsed(models / name, *words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_model_of_ids_takes_no_bytes(tmp_path, capsys):
    config = dataclasses.replace(tiny(), data=MarkovConfig())
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    with pytest.raises(SystemExit):
        parsed(tmp_path, "--data.path", "a.jsonl")
    message = "the model to begin with has those of a synthetic language"
    assert message in capsys.readouterr().err


def test_a_copy_of_the_models_tokenizer_may_be_named(models, tmp_path):
    _write_tokenizer(tmp_path, SEPARATOR)
    named = ("data.tokenizer:file", "--data.tokenizer.path", str(tmp_path))
    config = parsed(models / "a trained vocabulary", "--data.path", "a.jsonl", *named)
    assert config.data.tokenizer == FileConfig(path=str(tmp_path))
