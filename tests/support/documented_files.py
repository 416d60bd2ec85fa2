# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Files that the commands of the documentation speak of: texts, chats, tasks and models."""

from __future__ import annotations

import json
import pathlib

import pyarrow
import zstandard
from pyarrow import parquet

from tests.support.huggingface_configs import CONFIGS
from tests.support.huggingface_directories import tokenizer_json, write_model
from tests.support.huggingface_models import build, write_directory
from tests.support.multi_token_files import with_module
from tests.support.shown_commands import write_texts as write_documents
from tests.support.source_tree import ROOT

CHATS = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(40)]
TASK = """\
task: sums
dataset_path: json
dataset_name: null
test_split: train
dataset_kwargs: {{data_files: {file}}}
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: ["{{{{completion}}}}", "no"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
"""A task of the harness that needs no network, for `--tasks sums --include FOLDER`."""

HUB = {
    "mistralai/Mixtral-8x7B-v0.1": "mixtral",
    "Qwen/Qwen3-30B-A3B": "qwen3_moe",
    "openai/gpt-oss-20b": "gpt_oss",
    "allenai/OLMoE-1B-7B-0924": "olmoe",
}
"""Models of the hub that pages name, by their family."""


def write_texts(folder: pathlib.Path) -> None:
    """Write documents, chats, questions, a reward, tasks, and rules for names of arrays."""
    pages = sorted((ROOT / ".docs").rglob("*.md"))
    texts = [page.read_text("utf-8")[:6000] for page in pages if "generated" not in page.parts]
    for place, ending in (("docs", "md"), ("docs/more", "txt"), ("src", "py"), ("texts", "txt")):
        (folder / place).mkdir(exist_ok=True)
        for number, text in enumerate(texts):
            (folder / place / f"{number}.{ending}").write_text(text)
    rows = [{"text": text} for text in texts]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "more.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    for place in ("web", "crawl"):
        (folder / place).mkdir()
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / place / "0.parquet")
    write_documents(folder / "texts.jsonl", 400)
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    questions = [{"prompt": chat["prompt"], "answer": chat["completion"]} for chat in CHATS]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (folder / "rewards.py").write_text("def score(question, text):\n    return len(text) / 99\n")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "sums.yaml").write_text(TASK.format(file=folder / "chats.jsonl"))
    everything = "RULES = (Rename('{all...}', '{all...}'),)"
    rules = f"from jaxmoe.checkpoint.mapping import Rename\n\n{everything}\n"
    (folder / "names.py").write_text(rules)


def write_models(folder: pathlib.Path) -> None:
    """Write small models of Hugging Face, in folders and in the cache of the hub."""
    for name in ("DIR", "OLMoE-1B-7B-0924"):
        write_model(folder / name)
    published = with_module("deepseek_v3")
    write_directory(folder / "PUBLISHED", published.config, published.state)
    write_hub(folder / "cache")


def write_hub(cache: pathlib.Path) -> None:
    """Write a cache of the hub with small models under the names of pages."""
    tokenizer = tokenizer_json()
    size = tokenizer["added_tokens"][0]["id"] + 1
    for name, family in HUB.items():
        place = cache / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = place / "snapshots" / ("0" * 40)
        config = {**CONFIGS[family], "vocab_size": size, "eos_token_id": size - 1}
        build(config).save_pretrained(snapshot)
        (snapshot / "tokenizer.json").write_text(json.dumps(tokenizer))
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("0" * 40)
