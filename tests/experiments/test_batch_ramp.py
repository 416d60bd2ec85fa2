# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run whose batch grows: what it counts, that it resumes in mid-ramp, what it refuses."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from jaxmoe import load_checkpoint
from jaxmoe.resilience import stop
from jaxmoe.run.assemble import assemble
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import make_plan
from jaxmoe.tracking import read_metrics

# Batches of 8 rows of 8 tokens in steps 1 and 2, and of 16 in two micro-batches in 3 and 4.
ROWS = [8, 8, 16, 16]
SMALL = (
    "markov",
    "--model.num_layers",
    "1",
    "--model.embed_dim",
    "16",
    "--model.moe.expert_dim",
    "16",
    "--model.attention.num_heads",
    "1",
    "--model.attention.num_kv_heads",
    "1",
    "--model.attention.head_dim",
    "8",
    "--training.steps",
    "4",
    "--training.batch_size",
    "16",
    "--training.sequence_length",
    "8",
    "--training.accumulation",
    "2",
    "--schedule.warmup_steps",
    "0",
    "--training.batch_ramp.fraction",
    "0.5",
    "--training.batch_ramp.stages",
    "1",
    "--evaluation.batches",
    "1",
    "--evaluation.every",
    "0",
    "--tracking.sample_length",
    "0",
    "--tracking.print_every",
    "1",
    "--optimizer.learning_rate",
    "0.01",
    "--tracking.trackers",
)


def leaves(directory):
    tree = load_checkpoint(directory / "checkpoints", step=4)
    tree["rng"] = jax.random.key_data(tree["rng"])
    return {jax.tree_util.keystr(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    assert pretrain.main([*SMALL, "--run.directory", str(directory)]) == ExitCode.DONE
    return directory


@pytest.mark.slow
def test_tokens_and_rates_are_those_of_the_batches(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["tokens"] == sum(ROWS) * 8 and summary["steps"] == 4
    series = read_metrics(whole / "metrics.jsonl")
    assert series["progress/tokens"][1].tolist() == (8 * np.cumsum(ROWS)).tolist()
    plain = [1.0 - 0.98 * step / 4 for step in range(4)]
    wanted = 0.01 * np.sqrt(np.array(ROWS) / 16) * plain
    np.testing.assert_allclose(series["train/learning_rate"][1], wanted, rtol=1e-6)
    config = RunDirectory(whole).load_config(PretrainConfig)
    assert config.training.tokens == sum(ROWS) * 8
    assert make_plan(config).config.training.batch_sizes.sizes == (8, 16)


@pytest.mark.slow
def test_a_run_stopped_in_mid_ramp_continues_exactly(whole, tmp_path, monkeypatch):
    """Stopped after step 1, with half of the small batches done."""
    directory, asked = tmp_path / "parts", []

    def agreed(self):
        asked.append(True)
        return "preempted" if len(asked) == 1 else None

    with monkeypatch.context() as patch:
        patch.setattr(stop.StopRequest, "agree", agreed)
        arguments = [*SMALL, "--run.directory", str(directory)]
        assert pretrain.main(arguments) == ExitCode.PREEMPTED
    assert json.loads((directory / "summary.json").read_text())["tokens"] == 8 * 8
    assert pretrain.main(arguments) == ExitCode.DONE
    expected, found = leaves(whole), leaves(directory)
    assert expected.keys() == found.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    for name in ("train/loss", "progress/tokens"):
        both = [read_metrics(run / "metrics.jsonl")[name][1] for run in (whole, directory)]
        np.testing.assert_array_equal(*both)


@pytest.mark.slow
def test_held_out_batches_may_have_a_size_of_their_own(whole):
    config = RunDirectory(whole).load_config(PretrainConfig)
    own = dataclasses.replace(config.evaluation, batch_size=8, batches=3)
    for evaluation, rows in ((config.evaluation, [16]), (own, [8, 8, 8])):
        assembly = assemble(dataclasses.replace(config, evaluation=evaluation))
        assert [batch.tokens.shape[0] for batch in assembly.held_out()] == rows


def test_devices_that_do_not_divide_a_small_batch(tmp_path, capsys):
    more = ("--training.batch_ramp.stages", "2")
    with pytest.raises(SystemExit) as stopped:
        pretrain.main([*SMALL, *more, "--run.directory", str(tmp_path)])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    assert (
        "training.batch_ramp has batches of 4 sequences (of training.batch_size=16) in 1"
        " micro-batches, whose sequences must be divisible by the 8 devices that share a batch:"
        " choose fewer training.batch_ramp.stages or a larger batch" in capsys.readouterr().err
    )
