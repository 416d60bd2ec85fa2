# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.checkpoint convert` between adapters of PEFT and runs that evaluate opens."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import evaluate
from experiments.checkpoint import __main__ as checkpoint
from experiments.cli.flags import ExitCode
from jaxmoe.adapters import LoraConfig, TargetsConfig
from jaxmoe.checkpoint import to_huggingface
from jaxmoe.checkpoint.huggingface.files import open_tensors
from jaxmoe.checkpoint.huggingface.peft import TENSORS, write_peft
from jaxmoe.checkpoint.huggingface.peft_config import ADAPTER_CONFIG
from jaxmoe.checkpoint.huggingface.tokenizer import TOKENIZER, byte_tokenizer
from jaxmoe.checkpoint.manifest import read_manifest
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.scaling.initialize import parameter_table

ADAPTER = LoraConfig(
    rank=2,
    expert_rank=1,
    targets=TargetsConfig(roles=("attention_in", "attention_out", "expert_in", "expert_out")),
)


def convert(*words) -> int:
    """Run the command."""
    return checkpoint.main(["convert", *map(str, words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of bytes, an adapter of PEFT, and the run that it is converted to."""
    place = tmp_path_factory.mktemp("peft")
    base = ModelConfig(
        vocab_size=256,
        num_layers=2,
        embed_dim=24,
        attention=AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=6, qk_norm="head"),
        moe=MoEConfig(num_experts=3, top_k=2, expert_dim=10),
    )
    model, rng = dataclasses.replace(base, adapter=ADAPTER), np.random.default_rng(0)
    flat = {
        row.path: (rng.normal(size=row.shape) / 5).astype(np.float32)
        for row in parameter_table(model)
    }
    params = parameter_table(base).tree(lambda row: flat[row.path])
    to_huggingface(base, params, place / "base", texts={TOKENIZER: json.dumps(byte_tokenizer())})
    write_peft(place / "adapter", model, flat, base=str(place / "base"))
    assert convert("--from_huggingface", place / "adapter", "--to", place / "run") == ExitCode.DONE
    return place


def test_imported_adapter_is_a_run_without_the_base(folder):
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["checkpoint"]["initial"]["path"] == str(folder / "base")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["base"]) == ("imported", str(folder / "base"))
    manifest = read_manifest(folder / "run" / "checkpoints" / "0")
    assert manifest.base is not None and manifest.base["path"] == str(folder / "base")
    params = {path for path in manifest.arrays if path.startswith("params/")}
    assert len(params) == 3 * 6 and all(":" in path for path in params)


def test_exported_adapter_is_the_imported_one_bit_for_bit(folder):
    code = convert(
        "--run.directory", folder / "run", "--to_huggingface", "peft", "--to", folder / "again"
    )
    assert code == ExitCode.DONE
    before, after = (open_tensors(folder / name / TENSORS) for name in ("adapter", "again"))
    assert before.keys() == after.keys() and len(before) == 2 * 2 * (4 + 2)
    for key, tensor in before.items():
        assert np.array_equal(np.asarray(tensor), np.asarray(after[key])), key
    configs = [(folder / name / ADAPTER_CONFIG).read_text() for name in ("adapter", "again")]
    assert configs[0] == configs[1]


def test_evaluation_uses_the_imported_adapter(folder, capsys):
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    losses = []
    for name in ("run", "base"):
        words = ["--run.directory", str(folder / name), "--batches", "1", "data:files"]
        words += ["--data.path", str(folder / "text.txt"), "--sequence_length", "16"]
        assert evaluate.main(words) == ExitCode.DONE
        losses.append(capsys.readouterr().out.split("eval/bits_per_token=")[1].split()[0])
    assert float(losses[0]) != float(losses[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--imported.base", "nowhere"), "adapts nowhere, which is neither a run nor"),
        (("--imported.batches", "3"), "leave the options of --imported out"),
    ],
)
def test_refusals_say_what_to_type(folder, capsys, words, message):
    with pytest.raises(SystemExit) as error:
        convert("--from_huggingface", folder / "adapter", "--to", folder / "other", *words)
    assert error.value.code == ExitCode.BAD_CONFIGURATION
    assert message in capsys.readouterr().err
