# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs whose data is gone and whose directory was moved."""

import json
import shutil

import numpy as np
import pytest

from experiments import evaluate, generate, pretrain
from experiments.checkpoint import convert
from experiments.cli.flags import ExitCode
from experiments.evaluate_tasks.harness import text_tokens
from jaxmoe.data import FilesConfig
from jaxmoe.data.text_only import build_text
from jaxmoe.data.tokenizer import BytesConfig, FileConfig, IdsConfig, TrainedConfig
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import copy_tokenizer, keep_tokenizer, own_data


@pytest.fixture
def docs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "docs"
    place.mkdir()
    for i in range(300):
        (place / f"{i}.txt").write_text(f"document {i} " + "word " * (i % 7))
    return place


@pytest.mark.parametrize("kind", ["trained", "file", "bytes", "ids"])
def test_kept_tokenizer_encodes_as_the_data_did(docs, tmp_path, kind):
    if kind == "file":
        trained = FilesConfig(path=(str(docs),), tokenizer=TrainedConfig(vocab_size=300)).build()
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "tokenizer.json").write_text(trained.tokenizer.content)  # pyright: ignore
    if kind == "ids":
        np.arange(200, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    tokenizer, path = {
        "trained": (TrainedConfig(vocab_size=300), docs),
        "file": (FileConfig(path=str(tmp_path / "mine"), separator="<|endoftext|>"), docs),
        "bytes": (BytesConfig(), docs),
        "ids": (IdsConfig(vocab_size=256), tmp_path / "ids.bin"),
    }[kind]
    config = PretrainConfig(data=FilesConfig(path=(str(path),), tokenizer=tokenizer))
    source, prompt = config.data.build(), "1 2 3"
    first, moved = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "moved")
    keep_tokenizer(first, config, source)
    keep_tokenizer(first, config, source)
    expected = source.encode(prompt)

    for place in ("docs", "cache", "mine"):
        shutil.rmtree(tmp_path / place, ignore_errors=True)
    (tmp_path / "ids.bin").unlink(missing_ok=True)
    moved.path.mkdir()
    copy_tokenizer(first, moved)
    shutil.rmtree(first.path, ignore_errors=True)
    text = build_text(own_data(config, moved))
    np.testing.assert_array_equal(text.encode(prompt), expected)
    assert text.decode(expected) == source.decode(expected)
    assert text.vocab_size == source.vocab_size


@pytest.mark.slow
def test_moved_run_needs_no_data_but_to_evaluate(docs, tmp_path, monkeypatch, capsys):
    run, moved = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    words = (
        "--model.num_layers",
        "1",
        "--model.embed_dim",
        "16",
        "--model.vocab_size",
        "300",
        "--model.attention.num_heads",
        "1",
        "--model.attention.num_kv_heads",
        "1",
        "--model.attention.head_dim",
        "16",
        "--model.moe.expert_dim",
        "16",
        "--model.moe.num_experts",
        "4",
        "--training.steps",
        "3",
        "--schedule.warmup_steps",
        "1",
        "--training.batch_size",
        "8",
        "--training.sequence_length",
        "16",
        "--evaluation.batches",
        "1",
        "--data.path",
        str(docs),
        "data.tokenizer:trained",
        "--data.tokenizer.vocab_size",
        "300",
        "--run.directory",
        str(run),
        "--tracking.trackers",
        "--tracking.sample_length",
        "0",
    )
    assert pretrain.main(words) == ExitCode.DONE
    capsys.readouterr()

    def written(place):
        more = ("--prompt", "document", "--length", "8")
        assert generate.main(["--run.directory", str(place), *more]) == ExitCode.DONE
        return capsys.readouterr().out

    before = written(run)
    moved.parent.mkdir()
    run.rename(moved)
    shutil.rmtree(docs)
    shutil.rmtree(tmp_path / "cache")
    assert written(moved) == before

    assembly, _, _ = load_run(str(moved), None, needs_data=False)
    text = text_tokens(assembly.source)
    assert text.decode(text.encode("document 3")) == "document 3" and text.separator == 0

    here = ["--run.directory", str(moved)]
    exported = [*here, "--to_huggingface", "auto", "--to", str(tmp_path / "exported")]
    assert convert.main(exported) == ExitCode.DONE
    tokenizer = json.loads((tmp_path / "exported" / "tokenizer.json").read_text())
    assert tokenizer == json.loads((moved / "tokenizer" / "tokenizer.json").read_text())
    assert convert.main([*here, "--quantise", "w8a8"]) == ExitCode.DONE
    capsys.readouterr()
    written(f"{moved}-w8a8")

    for command, more in ((evaluate, ()), (convert, ("--quantise", "w4ax"))):
        with pytest.raises(SystemExit) as stopped:
            command.main([*here, *more])
        assert stopped.value.code == ExitCode.BAD_CONFIGURATION
        said = " ".join(capsys.readouterr().err.split())
        assert f"{moved}: its data, which this command reads, cannot be read: data.path=" in said


def test_a_run_whose_config_lacks_fields_is_refused(finished, tmp_path, capsys):
    """Such as one of before version 0.2.0."""
    older = tmp_path / "older"
    shutil.copytree(finished, older)
    config = json.loads((older / "config.json").read_text())
    del config["training"]["gradients"], config["model"]["loop"], config["model"]["adapter"]
    (older / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--run.directory", str(older), "--prompt", "1 2 3", "--length", "3"])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    said = " ".join(capsys.readouterr().err.split())
    assert "config.json: " in said and " misses " in said
