# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A damaged tokenizer in a run directory: named in words by what reads the run."""

import json
import shutil

import pytest

from experiments import pretrain
from experiments.cli.exit_codes import ExitCode
from jaxmoe.errors import ConfigurationError
from jaxmoe.run import Run
from tests.support.runs import SMALL

pytestmark = pytest.mark.slow


def _words(folder, steps):
    data = ("data:files", "data.tokenizer:trained", "--data.path", str(folder / "sums.jsonl"))
    sizes = ("--data.tokenizer.vocab_size", "280", "--data.cache", str(folder / "cache"))
    more = ("--model.vocab_size", "280", "--evaluation.batches", "1")
    length = ("--training.steps", str(steps), "--tracking.sample_length", "0")
    where = ("--run.directory", str(folder / "run"))
    return [*SMALL, *data, *sizes, *more, *length, *where]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    sums = [f"{a}+{b}={a + b}\n" for a in range(10) for b in range(10)] * 4
    (folder / "sums.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in sums))
    assert pretrain.main(_words(folder, 3)) == ExitCode.DONE
    return folder / "run"


def _exchange_ids(path, text):
    """Leave a valid tokenizer that spells 1 as 2."""
    found = json.loads(text)
    ids = found["model"]["vocab"]
    ids["1"], ids["2"] = ids["2"], ids["1"]
    path.write_text(json.dumps(found))


DAMAGE = {
    "exchanged": _exchange_ids,
    "empty": lambda path, text: path.write_text(""),
    "cut": lambda path, text: path.write_text(text[: len(text) // 2]),
    "null": lambda path, text: path.write_text("null"),
    "deep": lambda path, text: path.write_text('{"model":' + "[" * 10**5),
    "bytes": lambda path, text: path.write_bytes(b"\xff\xfe" + text.encode()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_tokenizer_of_a_run_is_named(trained, tmp_path, kind):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    DAMAGE[kind](path, path.read_text())
    for use in (lambda run: run.generate("1+", length=2), lambda run: run.evaluate()):
        with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
            use(Run.open(tmp_path / "run"))
