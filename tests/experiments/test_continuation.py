# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that go on with more steps, in their directory or as a branch in another."""

import dataclasses
import html
import json

import numpy as np
import pytest

from experiments import describe, pretrain, recipes
from experiments.cli.continuation import named_fields
from experiments.cli.flags import ExitCode, parse_flags
from experiments.plan.config import RECIPES as PLANNED
from experiments.plan.config import space_of
from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.configs import to_json
from jaxmoe.optim import CosineConfig, WarmupStableDecayConfig
from jaxmoe.planning.search import EVERYTHING
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import make_plan
from jaxmoe.run.provenance.lineage import check_config, config_check, read_lineage
from tests.support.runs import flags, logged_losses, saved_leaves

WSD = ("schedule:wsd", "--tracking.sample_length", "0", "--evaluation.every", "0")


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        ("execution.dispatcher:all_to_all", "dispatchers"),
        ("--execution.dispatcher all_to_all", "dispatchers"),
        ("--execution.dispatcher=all_to_all", "dispatchers"),
        ("--execution.dispatcher.min_rows 8", "dispatchers"),
        ("--execution.pipeline gpipe", "pipelines"),
        ("execution.pipeline:gpipe", "pipelines"),
        ("--execution.remat full", "remats"),
    ],
)
def test_a_plan_keeps_what_the_command_line_chooses(choice, kept):
    words = choice.split()
    config = parse_flags(PLANNED["tiny"](), words, "jaxmoe plan", "")
    space = space_of(config, words)
    one = type(getattr(EVERYTHING, kept))()
    assert space == dataclasses.replace(EVERYTHING, **{kept: one}) != EVERYTHING


def _same_state(one, other, step):
    expected, found = saved_leaves(one, step), saved_leaves(other, step)
    assert expected.keys() == found.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)


@pytest.mark.slow
def test_extended_and_branched_runs_equal_longer_runs_bitwise(tmp_path, capsys):
    whole, short, branch = tmp_path / "whole", tmp_path / "short", tmp_path / "branch"
    decayed = (*WSD, "--checkpoint.every", "0")  # only before the decay, and at the end
    assert pretrain.main(flags(whole, 20, *decayed)) == ExitCode.DONE
    assert pretrain.main(flags(short, 10, *decayed)) == ExitCode.DONE
    assert sorted(int(p.name) for p in (short / "checkpoints").glob("[0-9]*")) == [8, 10]
    capsys.readouterr()

    more = ("--training.steps", "20")
    named = ("--run.directory", str(branch))
    words = ["branch", str(short), *named, *more, "--checkpoint.initial.step", "8"]
    assert pretrain.main(words) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "(continuing after step 8)" in printed
    event = f"branched from {short} at step 8: training.steps: 10 -> 20"
    assert f"lineage  {event}" in printed
    assert html.escape(event) in (branch / "report.html").read_text()
    assert logged_losses(branch) == logged_losses(whole)  # those up to step 8 were copied
    _same_state(whole, branch, 20)
    assert pretrain.main(words) == ExitCode.DONE
    assert "nothing to do" in capsys.readouterr().out

    # In place, with a rate that stays: the same as if it had been so from the start.
    stays = (*WSD[1:], "--schedule.floor", "1.0")
    held, extended = tmp_path / "held", tmp_path / "extended"
    assert pretrain.main(flags(held, 6, *stays)) == ExitCode.DONE
    assert pretrain.main(flags(extended, 3, *stays)) == ExitCode.DONE
    more = ["resume", str(extended), "--training.steps", "6", "--evaluation.every", "2"]
    assert pretrain.main(more) == ExitCode.DONE
    printed = capsys.readouterr().out
    event = "extended at step 3: evaluation.every: 0 -> 2, training.steps: 3 -> 6"
    assert f"lineage  {event}" in printed
    assert logged_losses(extended) == logged_losses(held)
    _same_state(held, extended, 6)

    # After the decay the rate rises again: a note names the checkpoint from before it.
    more = ["resume", str(short), "--training.steps", "11", "--optimizer.learning_rate", "0.006"]
    assert pretrain.main(more) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "rate     0.0025 at step 10, 0.003 at step 11" in printed
    assert f"branch {short} --checkpoint.initial.step 8 --run.name NAME" in printed
    assert json.loads((short / "summary.json").read_text())["steps"] == 11


@pytest.fixture
def begun(tmp_path):
    """Run directory with a config and the name of a checkpoint, without any array."""
    directory = RunDirectory(tmp_path / "run")
    config = recipes.markov(steps=100)
    (directory.checkpoints_directory / "50").mkdir(parents=True)
    check_config(directory, config, make_plan(config), extends=False)()
    return directory, config


def _check(directory, config, extends):
    check_config(directory, config, make_plan(config), extends=extends)()


def _with(config, group, **changes):
    part = dataclasses.replace(getattr(config, group), **changes)
    return dataclasses.replace(config, **{group: part})


def test_extension_is_explicit_and_recorded(begun, capsys):
    directory, config = begun
    longer = _with(config, "training", steps=200)
    with pytest.raises(ValueError) as refused:
        _check(directory, longer, extends=False)
    assert str(refused.value).endswith(
        f"or extend the run: jaxmoe pretrain resume {directory.path} --training.steps 200"
    )
    assert not directory.lineage_file.exists()
    _check(directory, longer, extends=True)
    _check(directory, longer, extends=True)
    _check(directory, longer, extends=False)
    cosine = dataclasses.replace(longer, schedule=CosineConfig(warmup_steps=10))
    with pytest.raises(ValueError, match=r"resume \S+ schedule:cosine$"):
        _check(directory, cosine, extends=False)
    _check(directory, cosine, extends=True)
    assert [str(event) for event in read_lineage(directory)] == [
        "extended at step 50: training.steps: 100 -> 200",
        "extended at step 50: schedule: linear -> cosine",
    ]
    assert describe.main(["--run.directory", str(directory.path)]) == 0
    shown = "lineage              extended at step 50: schedule: linear -> cosine\n"
    assert shown in capsys.readouterr().out


def _checkpoint(config, step=50):
    given = to_json(dataclasses.replace(config, model=make_plan(config).model))
    return CheckpointManifest(step=step, arrays={}, config=given, data={})


def _check_saved(directory, config, manifest, extends: bool | frozenset[str] = False):
    plan = make_plan(config)
    own = dataclasses.replace(config, model=plan.model)
    agrees = config_check(directory, own, extends)
    check_config(directory, config, plan, extends=extends is not False)()
    agrees(manifest)


def test_a_checkpoint_with_another_config_than_config_json_is_refused(begun):
    directory, config = begun
    saved = _checkpoint(config)
    _check_saved(directory, config, saved)
    other = _with(config, "optimizer", learning_rate=0.5)
    directory.config_file.write_text(json.dumps(to_json(other)))
    old = config.optimizer.learning_rate
    with pytest.raises(ValueError) as refused:
        _check_saved(directory, other, saved)
    assert str(refused.value) == (
        f"{directory.config_file} is not the config with which step 50 was trained:\n"
        f"  optimizer.learning_rate: {old} in the checkpoint, 0.5 in config.json\n"
        f"write the values of the checkpoint into {directory.config_file}, or say which ones shall"
        f" hold: jaxmoe pretrain resume {directory.path}"
        f" --optimizer.learning_rate {old}"
    )
    _check_saved(directory, other, saved, frozenset({"optimizer.learning_rate"}))
    _check_saved(directory, config, saved, frozenset({"optimizer.learning_rate"}))
    _check_saved(directory, config, saved)
    wrong = _with(config, "training", seed=7)
    directory.config_file.write_text(json.dumps(to_json(wrong)))
    with pytest.raises(ValueError, match=r"training.seed: 0 in the .* 7 in config.json\n.*n$"):
        _check_saved(directory, wrong, saved, frozenset({"training.seed"}))


def test_a_checkpoint_from_before_an_extension_is_accepted(begun):
    directory, config = begun
    saved, longer = _checkpoint(config), _with(config, "training", steps=200)
    _check_saved(directory, longer, saved, extends=True)
    _check_saved(directory, longer, saved)  # killed before its first save, and started again
    _check_saved(directory, longer, _checkpoint(config, step=40))
    with pytest.raises(ValueError, match=r"training.steps: 100 in the checkpoint, 200 in config"):
        _check_saved(directory, longer, _checkpoint(config, step=60))  # saved after it
    assert named_fields(
        ["--training.steps=9", "--training.guard.max-skipped", "3", "schedule:wsd"]
    ) >= {
        "training.steps",
        "training.guard.max_skipped",
        "schedule",
    }


REFUSED = {
    "model": (
        lambda config: _with(config, "model", num_layers=3),
        r"model.num_layers: saved \d, given 3 \(the parameters belong to this model\)",
    ),
    "data": (
        lambda config: _with(config, "training", batch_size=8, steps=200),
        r"training.batch_size: saved 32, given 8 \(the data position counts rows of this size\)",
    ),
    "optimizer": (
        lambda config: _with(config, "optimizer", beta1=0.8),
        r"optimizer.beta1: saved 0.9, given 0.8 \(the optimiser's state belongs to it\)",
    ),
    "fewer steps": (
        lambda config: _with(config, "training", steps=40),
        r"training.steps=40 must be at least 50, the step that the run has done: branch from an",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_extension_refuses_what_the_state_belongs_to(begun, name):
    directory, config = begun
    change, words = REFUSED[name]
    before = directory.config_file.read_bytes()
    with pytest.raises(ValueError, match=words) as refused:
        _check(directory, change(config), extends=True)
    assert "training.steps: saved" not in str(refused.value)  # it may change
    assert directory.config_file.read_bytes() == before and not directory.lineage_file.exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["resume"], "resume needs a run directory: jaxmoe pretrain resume runs"),
        (["resume", "{run}/none"], "none holds no run"),
        (["resume", "{run}", "--run.directory", "x"], "run.directory=x is another: leave it out"),
        (["{run}"], "is a run: continue it with jaxmoe pretrain resume /"),
        (["branch", "{run}"], "a branch is a new run: give it a name"),
        (["branch", "{run}", "--run.directory", "{run}"], "holds the run that is branched"),
        (["branch", "{run}", "--run.directory", "{run}-2"], "holds no checkpoint"),
    ],
)
def test_command_lines_that_cannot_continue_a_run(begun, more, words, capsys):
    directory, _ = begun
    with pytest.raises(SystemExit) as stopped:
        pretrain.main([word.format(run=directory.path) for word in more])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    assert words in " ".join(capsys.readouterr().err.split())


def test_stable_step_is_the_last_before_the_decay():
    assert WarmupStableDecayConfig().stable_step(10) == 8
    assert WarmupStableDecayConfig(decay_fraction=1.0).stable_step(10) is None
    assert CosineConfig().stable_step(10) is None
