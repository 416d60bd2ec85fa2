# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning from the command line: trained, resumed bitwise, opened, and refused."""

import json
import shutil
import signal

import jax
import numpy as np
import pytest

from experiments import finetune, pretrain
from experiments.cli.flags import ExitCode
from experiments.rl import __main__ as rl
from jaxmoe import load_checkpoint
from jaxmoe.run import Run
from jaxmoe.tracking.jsonl import read_metrics
from tests.support.full_disk import end_on_a_full_disk
from tests.support.runs import SMALL, logged_losses, saved_leaves, start_run, written_by

MEASURES = {"reward", "solved", "kl", "clipped", "length", "rollout_s", "train_s"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run on sums in bytes."""
    folder = tmp_path_factory.mktemp("rl")
    sums = [f"{a}+{b}={a + b}\n" for a in range(10) for b in range(10)] * 4
    (folder / "sums.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in sums))
    (folder / "questions.jsonl").write_text('{"prompt": "1+", "answer": "[0-9a-z]"}\n' * 8)
    data = ("data:files", "--data.path", str(folder / "sums.jsonl"), "--data.cache", str(folder))
    model = ("--model.vocab_size", "256", "--run.directory", str(folder / "begun"))
    steps = ("--training.steps", "3", "--tracking.sample_length", "0")
    assert pretrain.main([*SMALL, "--evaluation.batches", "1", *data, *model, *steps]) == 0
    return folder / "begun"


def flags(begun, directory, steps, *more):
    where = ("--checkpoint.initial.path", str(begun), "--run.directory", str(directory))
    sizes = ("--rl.group", "2", "--rl.prompts", "4", "--rl.max_tokens", "4")
    length = ("--training.steps", str(steps), "--schedule.warmup_steps", "1")
    outputs = ("--tracking.sample_length", "0", "--checkpoint.every", "2", "--tracking.trackers")
    # Some answers of a model that has learned little have a digit or a letter, and others none.
    questions = begun.parent / "questions.jsonl"
    reward = ("reward:match", "--rl.reward.compare", "regex", "--rl.reward.path", str(questions))
    return [*where, *reward, *sizes, *length, *outputs, *more]


HELD = ("--objective.beta", "0.1", "--rl.truncation", "2.0")


@pytest.fixture(scope="module")
def trained(begun, tmp_path_factory):
    """A run of 4 steps, with a reference model and importance weights, in one go."""
    directory = tmp_path_factory.mktemp("rl") / "trained"
    assert rl.main(flags(begun, directory, 4, *HELD)) == ExitCode.DONE
    return directory


@pytest.mark.slow
def test_a_run_logs_its_rewards_and_changes_all_parameters(begun, trained):
    series = read_metrics(trained / "metrics.jsonl")
    for name in MEASURES:
        steps, values = series[f"rl/{name}"]
        assert steps.tolist() == [1, 2, 3, 4] and np.isfinite(values).all()
    assert series["rl/kl"][1][0] == pytest.approx(0.0, abs=1e-6) and (series["rl/kl"][1] >= 0).all()
    before = load_checkpoint(begun / "checkpoints", step=3)["params"]
    after = load_checkpoint(trained / "checkpoints", step=4)["params"]
    changed = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), before, after)
    assert all(jax.tree.leaves(changed))


@pytest.mark.slow
def test_with_rows_cut_over_devices_the_first_step_is_the_same(begun, trained, tmp_path):
    mesh = ("--execution.mesh.data", "4", "--execution.mesh.seq", "2")
    mesh += ("execution.sequence_parallel:auto",)
    assert rl.main(flags(begun, tmp_path / "cut", 2, *HELD, *mesh)) == ExitCode.DONE
    wanted, cut = (read_metrics(at / "metrics.jsonl") for at in (trained, tmp_path / "cut"))
    for name in ("rl/reward", "rl/kl", "rl/length", "train/loss", "train/grad_norm"):
        np.testing.assert_allclose(cut[name][1][0], wanted[name][1][0], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_resumed_in_the_middle_it_ends_bitwise_alike(begun, trained, tmp_path):
    stopped = tmp_path / "stopped"
    shutil.copytree(trained, stopped)
    shutil.rmtree(stopped / "checkpoints" / "4")
    held = ("--objective.beta", "0.1", "--rl.truncation", "2.0")
    assert rl.main(flags(begun, stopped, 4, *held)) == ExitCode.DONE
    ends = [saved_leaves(directory, 4) for directory in (trained, stopped)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert logged_losses(stopped) == logged_losses(trained)


# Kills itself: in step 3 whose answers, and those of step 4, are drawn; or while step 2 is saved.
KILLED = """
import os, signal, sys
from experiments.rl import __main__ as rl
from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.contrib.rl.feed import RolloutFeed

moment = sys.argv.pop(1)
call, save, number = RolloutFeed.train, CheckpointManager.save, 0

def end():
    os.kill(os.getpid(), signal.SIGKILL)

def called(self, *given):
    global number
    number += 1
    after = call(self, *given)
    if moment == "ahead" and number == 3:
        end()
    return after

def saved(self, *given, **named):
    save(self, *given, **named)
    end()

RolloutFeed.train = called
if moment == "saving":
    CheckpointManager.save = saved
rl.main(sys.argv[1:])
"""


AHEAD = ("--rl.staleness", "1", "--rl.old", "engine")


@pytest.fixture(scope="module")
def whole(begun, tmp_path_factory):
    """A run of 4 steps, whose answers are drawn ahead, in one go."""
    directory = tmp_path_factory.mktemp("rl") / "ahead"
    assert rl.main(flags(begun, directory, 4, *AHEAD)) == ExitCode.DONE
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["ahead", "saving"])
def test_a_run_that_is_killed_with_answers_drawn_ahead_resumes_bitwise(
    moment, begun, whole, tmp_path
):
    killed = tmp_path / "killed"
    process = start_run([moment, *flags(begun, killed, 4, *AHEAD)], KILLED)
    (output,) = written_by(process)
    assert process.returncode == -signal.SIGKILL, output
    assert not (killed / "summary.json").exists()
    assert rl.main(flags(begun, killed, 4, *AHEAD)) == ExitCode.DONE
    ends = [saved_leaves(directory, 4) for directory in (whole, killed)]
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flipped", "cut", "missing"])
def test_damage_of_a_run_on_rewards_is_named_and_the_step_before_resumes(
    kind, begun, trained, tmp_path, caplog
):
    damaged = tmp_path / "damaged"
    shutil.copytree(trained, damaged)
    files = [path for path in (damaged / "checkpoints" / "4" / "state").rglob("*")]
    largest = max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    {
        "flipped": lambda: largest.write_bytes(data),
        "cut": lambda: largest.write_bytes(data[: len(data) // 2]),
        "missing": largest.unlink,
    }[kind]()
    assert rl.main(flags(begun, damaged, 4, *HELD)) == ExitCode.DONE
    assert largest.name in caplog.text and (damaged / "checkpoints" / "damaged" / "4").is_dir()
    ends = [saved_leaves(directory, 4) for directory in (trained, damaged)]
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("--rl.staleness", "1", "--rl.sync", "exact", "--rl.old", "engine"),
        ("--rl.replay", "True", "--rl.page_size", "2"),
    ],
    ids=["ahead", "replay"],
)
def test_answers_drawn_ahead_and_replayed_experts_resume_bitwise(more, begun, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert rl.main(flags(begun, whole, 4, *more)) == ExitCode.DONE
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "4")
    assert rl.main(flags(begun, stopped, 4, *more)) == ExitCode.DONE
    ends = [saved_leaves(directory, 4) for directory in (whole, stopped)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    series = read_metrics(whole / "metrics.jsonl")
    if "--rl.replay" in more:
        assert (series["rl/replayed"][1] == 1.0).all()
    else:
        assert series["rl/stale"][1].tolist() == [0, 1, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--rl.epochs", "1", "--rl.minibatches", "4")])
def test_several_updates_a_step_leave_the_answers_and_the_loss_cuts_ratios(more, begun, tmp_path):
    """By default, too; a single update never does. Steps and schedule count answers drawn."""
    sizes = ("--rl.prompts", "8", "--rl.group", "8", "--schedule.warmup_steps", "0")
    rate = ("--optimizer.learning_rate", "0.01")
    clipped, params = {}, {}
    for name, given in {"once": ("--rl.epochs", "1"), "often": more}.items():
        words = flags(begun, tmp_path / name, 2, *sizes, *rate, *given)
        assert rl.main(words) == ExitCode.DONE
        series = read_metrics(tmp_path / name / "metrics.jsonl")
        steps, values = series["rl/clipped"]
        assert steps.tolist() == [1, 2]
        clipped[name], params[name] = values, saved_leaves(tmp_path / name, 2)
    assert clipped["once"].tolist() == [0.0, 0.0] and clipped["often"].max() > 0.01
    counts = {
        name: {int(v) for k, v in leaves.items() if k.endswith("count") or k.endswith("count']")}
        for name, leaves in params.items()
    }
    updates = 4 if more else 2
    assert counts == {"once": {2}, "often": {2 * updates}}
    assert [int(leaves["['step']"]) for leaves in params.values()] == [2, 2]


@pytest.mark.slow
def test_a_trained_run_is_evaluated_and_fine_tuned_like_any_other(trained, tmp_path):
    assert np.isfinite(Run.open(trained).evaluate().bits_per_token)
    config = finetune.finetune_config(str(trained))
    assert config.rl is None and config.training.objective.name == "next_token"


@pytest.mark.slow
def test_an_adapter_learns_alone(begun, tmp_path):
    adapter = ("adapter:lora", "--adapter.rank", "2", "--adapter.targets.roles", "attention_in")
    old = ("--rl.old", "engine", "--objective.advantage", "rloo")
    assert rl.main(flags(begun, tmp_path / "run", 2, *adapter, *old)) == ExitCode.DONE
    params = load_checkpoint(tmp_path / "run" / "checkpoints", step=2)["params"]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert names and all(":" in name for name in names)


@pytest.mark.slow
def test_answers_drawn_ahead_and_sent_updates_are_bitwise_those_of_copies(begun, tmp_path):
    runs = {sync: tmp_path / sync for sync in ("copy", "exact")}
    for sync, directory in runs.items():
        ahead = ("--checkpoint.every", "3", "--rl.staleness", "1", "--rl.scorers", "2")
        ahead += ("--rl.old", "engine")
        assert rl.main(flags(begun, directory, 3, *ahead, "--rl.sync", sync)) == ExitCode.DONE
    series = read_metrics(runs["exact"] / "metrics.jsonl")
    assert series["rl/stale"][1].tolist() == [0, 1, 1]
    assert series["rl/ahead"][1].max() == 4 and not series["rl/dropped"][1].any()
    assert series["rl/sync"][1][0] == 1.0 and 0 < series["rl/sync"][1][-1] <= 1.01
    jax.tree.map(np.testing.assert_array_equal, *(saved_leaves(run, 3) for run in runs.values()))
    assert logged_losses(runs["copy"]) == logged_losses(runs["exact"])


REFUSED = {
    "--checkpoint.initial.path is missing": ("--rl.group", "2"),
    "training.batch_size=8 must be rl.prompts x rl.group at every step": (
        "--rl.group",
        "2",
        "--rl.prompts",
        "2",
        "--training.batch_size",
        "8",
    ),
    "training.objective:next_token trains on data": ("training.objective:next_token",),
    "must be at least rl.max_tokens=500": ("--rl.max_tokens", "500"),
    "with rl.staleness=0 it answers by those in": ("--rl.sync", "exact"),
    "rl.reward.path is empty": ("reward:match",),
    "choose replicas:none": ("replicas:diloco",),
}


@pytest.mark.rows(1)
@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_trained_is_refused(message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run is the default
    with pytest.raises(SystemExit) as end:
        rl.main([*REFUSED[message]])
    assert end.value.code == ExitCode.BAD_CONFIGURATION
    assert message in capsys.readouterr().err


def test_pretrain_refuses_an_objective_without_answers(capsys):
    with pytest.raises(SystemExit):
        pretrain.main(["tiny", "training.objective:policy_gradient"])
    assert "train with jaxmoe rl" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_ends_it_with_the_code_of_a_state_that_is_not_saved(begun, tmp_path):
    code, output = end_on_a_full_disk("experiments.rl.__main__", flags(begun, tmp_path / "run", 4))
    assert code == ExitCode.NOT_SAVED and "the last state could not be saved" in output
    assert "Traceback" not in output
