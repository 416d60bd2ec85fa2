# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning with mixed additions from the command line: trained, opened, and not folded."""

import numpy as np
import pytest
from flax import traverse_util

from experiments import evaluate, finetune, generate, pretrain
from experiments.checkpoint import __main__ as checkpoint
from experiments.cli.flags import ExitCode
from jaxmoe.checkpoint.manifest import read_manifest
from jaxmoe.run.load import load_run
from tests.support.runs import flags, logged_losses

QUICK = ("--training.steps", "2", "--schedule.warmup_steps", "1", "--tracking.sample_length", "0")
ADAPTERS = {
    "lora_mixer": ("--adapter.members", "4"),
    "remix": ("--adapter.members", "4", "--adapter.draws", "2"),
    "task_lora": ("--adapter.members", "2", "--adapter.rank", "2"),
    "multi_head_routing": ("--adapter.tasks", "2", "--adapter.splits", "2"),
}


def mixture(texts):
    parts = [f"{path.stem}={weight}:{path}" for weight, path in zip((2, 1), texts, strict=True)]
    return "data:mixture", "--data.mix", *parts


def tuning(base, directory, name, texts):
    where = ("--checkpoint.initial.path", str(base), "--run.directory", str(directory))
    adapter = (f"adapter:{name}", *ADAPTERS[name])
    return [*where, *QUICK, "--tracking.trackers", *mixture(texts), *adapter]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, words in (("one", "to be or not to be "), ("two", "0 1 1 2 3 5 8 13 21 ")):
        (folder / f"{name}.txt").write_text(words * 4000, encoding="utf-8")
    return [folder / "one.txt", folder / "two.txt"]


@pytest.fixture(scope="module")
def base(texts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "bytes"
    words = flags(directory, 3, "--model.vocab_size", "256", *mixture(texts))
    assert pretrain.main(words) == ExitCode.DONE
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_mixture_is_trained_evaluated_and_read_and_not_folded(
    name, base, texts, tmp_path, capsys
):
    directory = tmp_path / name
    assert finetune.main(tuning(base, directory, name, texts)) == ExitCode.DONE
    assert len(logged_losses(directory)) == 2
    assembly, _, step = load_run(str(directory), None)
    batch = assembly.loader.batch(0)
    assert step == 2
    assert set(batch.extra) == ({"task"} if name in ("task_lora", "multi_head_routing") else set())
    if batch.extra:
        assert {int(task) for task in batch.extra["task"].ravel()} == {0, 1}
    assert evaluate.main(["--run.directory", str(directory)]) == ExitCode.DONE
    words = ["--run.directory", str(directory), "--prompt", "to be", "--length", "3"]
    assert generate.main(words) == ExitCode.DONE
    convert = ["convert", "--run.directory", str(directory), "--fold", "True"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        checkpoint.main([*convert, "--to", str(tmp_path / "folded")])
    assert ended.value.code == ExitCode.BAD_CONFIGURATION
    assert "depends on the token" in capsys.readouterr().err


@pytest.mark.slow
def test_logits_alone_go_on_from_trained_additions_and_a_prompt_names_its_task(
    base, texts, tmp_path, capsys
):
    """MHR-z from the command line, and generate --task."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert finetune.main(tuning(base, first, "multi_head_routing", texts)) == ExitCode.DONE
    where = ["--checkpoint.initial.path", str(first), "--run.directory", str(second)]
    quick = [*where, *QUICK, "--tracking.trackers"]
    assert finetune.main([*quick, "--adapter.trains", "logits"]) == ExitCode.DONE
    manifest = read_manifest(second / "checkpoints" / "2")
    assert manifest.base is not None and manifest.base["path"] == str(base)
    earlier, afters = (
        traverse_util.flatten_dict(load_run(str(run), None, needs_data=False)[1].params, sep="/")
        for run in (first, second)
    )
    for path, before in earlier.items():
        assert np.array_equal(before, afters[path]) != path.endswith(":logits"), path
    words = ["--run.directory", str(second), "--prompt", "to be", "--length", "3", "--task"]
    assert generate.main([*words, "two"]) == ExitCode.DONE
    for run, task, message in (
        (second, "three", "task=three is unknown: give the number of a task, or by name one of"),
        (second, "7", "adapter.task=7 must be at least 0 and at most 1"),
        (base, "0", "task=0: the model has no adapter, and so no tasks"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            generate.main(["--run.directory", str(run), *words[2:], task])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        finetune.main([*quick[:2], "--run.directory", str(tmp_path / "third"), "adapter:select"])
    assert "holds another adapter than model.adapter" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mixture_of_more_parts_than_tasks_is_refused(base, texts, tmp_path, capsys):
    words = tuning(base, tmp_path / "run", "task_lora", texts)
    words[words.index("--adapter.members") + 1] = "1"
    with pytest.raises(SystemExit):
        finetune.main(words)
    message = capsys.readouterr().err
    assert "data.mix has 2 parts, and adapter:task_lora has 1 tasks" in message
