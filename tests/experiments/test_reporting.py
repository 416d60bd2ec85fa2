# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""From reports of the loop to trackers: MFU, tokens and seconds, and who writes at all."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.doctor.devices import tiny_config
from jaxmoe.run import reporter as reporting
from jaxmoe.run.assemble import assemble
from jaxmoe.run.config import TrackingConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import make_plan
from jaxmoe.run.provenance import lineage
from jaxmoe.run.reporter import Reporter
from jaxmoe.run.reporting.summary import closing_message, load_window
from jaxmoe.scaling import BasePoint, MuPConfig, TokenExponents
from jaxmoe.tracking import MFU, TOKENS_PER_SECOND, read_metrics
from jaxmoe.tracking.tracker import BITS_PER_TOKEN, TRAINED_SECONDS, TRAINED_TOKENS
from jaxmoe.training.evaluate import Evaluation
from jaxmoe.training.loop import Report
from jaxmoe.training.step import StepMetrics


@pytest.fixture
def assembly():
    config = tiny_config(8)
    training = dataclasses.replace(config.training, steps=20)
    tracking = TrackingConfig(console="plain", trackers=())
    return assemble(dataclasses.replace(config, training=training, tracking=tracking))


def report(first: int, last: int, seconds: float) -> Report:
    metrics = StepMetrics(
        loss=jnp.float32(2.0),
        losses={},
        grad_norm=jnp.float32(0.5),
        num_tokens=jnp.float32(128.0),
        is_skipped=jnp.bool_(False),
        skipped_in_a_row=jnp.int32(0),
        router={},
        load=jnp.full((1, 4), 0.25),
    )
    steps = tuple(range(first, last + 1))
    return Report(steps=steps, metrics=(jax.device_get(metrics),) * len(steps), seconds=seconds)


def test_records_know_tokens_seconds_and_mfu(assembly, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reporting, "model_flops_utilization", lambda *_: 0.25)
    directory = RunDirectory(tmp_path)
    reporter = Reporter("r", directory, assembly, 0)
    reporter.log_steps(report(1, 4, 8.0))
    reporter.log_steps(report(5, 6, 1.0))
    reporter.close()
    reporter.close()
    assert "mfu=25.0%" in capsys.readouterr().out
    series = read_metrics(directory.metrics_file)
    assert series[TRAINED_TOKENS][1].tolist() == [128.0 * step for step in range(1, 7)]
    assert series[TRAINED_SECONDS][1].tolist() == [2.0, 4.0, 6.0, 8.0, 8.5, 9.0]
    assert series[MFU][0].tolist() == series[TOKENS_PER_SECOND][0].tolist() == [4, 6]
    assert reporter.mfu == 0.25 and reporter.trained_seconds == 9.0
    # Saved at step 4, and started again from there: the seconds of 5 and 6 are spent anew.
    resumed = Reporter("r", directory, assembly, 4)
    resumed.log_steps(report(5, 5, 3.0))
    resumed.close()
    series = read_metrics(directory.metrics_file)
    assert series[TRAINED_SECONDS][1].tolist() == [2.0, 4.0, 6.0, 8.0, 11.0]
    schedule = assembly.plan.schedule
    wanted = [float(schedule(jnp.int32(step))) for step in range(5)]
    rates = series["train/learning_rate"][1] / assembly.plan.config.optimizer.learning_rate
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)


def test_the_speed_counts_positions_whatever_their_loss_weights(assembly, tmp_path, capsys):
    directory = RunDirectory(tmp_path)
    reporter = Reporter("r", directory, assembly, 0)
    answers = dataclasses.replace(report(1, 4, 8.0), positions=4 * 1280.0)
    reporter.log_steps(answers)
    reporter.close()
    assert read_metrics(directory.metrics_file)[TOKENS_PER_SECOND][1].tolist() == [640.0]
    assert reporter.tokens_per_second == 640.0


def test_the_rate_is_that_of_the_updates_so_far(assembly, tmp_path, monkeypatch, capsys):
    """A refused step is none of them: also after a resume, and after going back."""
    directory = RunDirectory(tmp_path)
    reporter = Reporter("r", directory, assembly, 0)
    steps = report(1, 6, 1.0)
    bad = dataclasses.replace(steps.metrics[0], is_skipped=np.bool_(True))
    good = steps.metrics[0]
    reporter.log_steps(dataclasses.replace(steps, metrics=(good, bad, bad, good, good, bad)))
    reporter.close()
    resumed = Reporter("r", directory, assembly, 5)
    resumed.log_steps(report(6, 7, 1.0))

    def check(updates, refused):
        series = read_metrics(directory.metrics_file)
        rates = series["train/learning_rate"][1] / assembly.plan.config.optimizer.learning_rate
        wanted = [float(assembly.plan.schedule(jnp.int32(count))) for count in updates]
        np.testing.assert_allclose(rates, wanted, rtol=1e-6)
        assert series["train/refused_steps"][1].tolist() == refused

    check([0, 1, 1, 1, 2, 3, 4], [1, 2, 2, 2, 2, 2])
    resumed.go_back(2)
    resumed.log_steps(report(3, 4, 1.0))
    resumed.close()
    check([0, 1, 1, 2], [1, 1, 1])
    lines = list[str]()
    monkeypatch.setattr(lineage, "say", lines.append)
    lineage._show_rates(directory, assembly.plan, assembly.plan, 4)
    factors = (float(assembly.plan.schedule(jnp.int32(count))) for count in (2, 3))
    old, new = (assembly.plan.matrix_rate * factor for factor in factors)
    assert lines == [f"rate     {old:.3g} at step 4, {new:.3g} at step 5"]


def test_the_rate_is_that_of_the_hidden_matrices(assembly, tmp_path, capsys):
    """Half of optimizer.learning_rate under muP at twice the base width."""
    config = assembly.plan.config
    rule = MuPConfig(exponents=TokenExponents(batch=0.0))
    base = BasePoint(embed_dim=config.model.embed_dim // 2)
    plan = make_plan(dataclasses.replace(config, parameterization=rule, base=base))
    directory = RunDirectory(tmp_path)
    reporter = Reporter("r", directory, dataclasses.replace(assembly, plan=plan), 0)
    reporter.log_steps(report(1, 1, 1.0))
    reporter.close()
    wanted = 0.5 * config.optimizer.learning_rate * float(plan.schedule(jnp.int32(0)))
    assert read_metrics(directory.metrics_file)["train/learning_rate"][1] == pytest.approx([wanted])


def test_a_resumed_run_knows_its_last_held_out_loss(assembly, tmp_path, capsys):
    directory = RunDirectory(tmp_path)
    reporter = Reporter("r", directory, assembly, 0)
    reporter.log_steps(report(1, 4, 8.0))
    reporter.log_evaluation(4, Evaluation(nats_per_token=1.5 * math.log(2.0), num_tokens=64))
    reporter.log_steps(report(5, 5, 1.0))
    reporter.log_evaluation(5, Evaluation(nats_per_token=1.0, num_tokens=64))
    reporter.close()
    resumed = Reporter("r", directory, assembly, 4)
    resumed.log_steps(report(5, 5, 3.0))
    resumed.close()
    assert resumed.last[BITS_PER_TOKEN] == pytest.approx(1.5)
    printed = capsys.readouterr().out
    assert "held out at step 4: 1.5000 bits per token" in printed and "eval/" not in printed


def test_a_run_that_goes_back_records_its_steps_anew(assembly, tmp_path, capsys):
    """What was refused is said with its reason, and counted over all of this start."""
    directory = RunDirectory(tmp_path)
    reporter = Reporter("r", directory, assembly, 0)
    reporter.start()
    refused = report(3, 3, 1.0)
    bad = dataclasses.replace(
        refused.metrics[0],
        grad_norm=np.float32(90.0),
        norm_limit=np.float32(15.0),
        is_skipped=np.bool_(True),
        skipped_in_a_row=np.int32(1),
    )
    reporter.log_steps(report(1, 2, 1.0))
    reporter.log_steps(dataclasses.replace(refused, metrics=(bad,)))
    reporter.log_steps(dataclasses.replace(refused, steps=(4,), metrics=(bad,)))
    text = "the gradient norm is above 15, the bound that recent steps set (loss 2, gradient norm"
    printed = capsys.readouterr().out
    assert f"warning at step 3: {text} 90)" in printed and f"warning at step 4: {text}" in printed
    assert printed.count("note at step 3:") == 1 and "note at step 4" not in printed, "once"
    for words in (
        "The batch is left out and training goes on.",
        "training.guard.max_norm_ratio=30 times the median",
        "lower optimizer.learning_rate=",
    ):
        assert words in printed
    assert read_metrics(directory.metrics_file)["train/loss"][0].tolist() == [1, 2, 3, 4]
    for step in (2, 0):
        reporter.go_back(step)
        done = read_metrics(directory.metrics_file).get("train/loss", ([], []))
        assert list(done[0]) == list(range(1, step + 1))
        assert ("train/loss" in reporter.last) == (step > 0) and reporter.skipped == 2
    reporter.log_steps(report(1, 2, 1.0))
    reporter.close()
    assert reporter.last["train/grad_norm"] == 0.5


def test_only_the_first_process_writes(assembly, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda *_: 1)
    directory = RunDirectory(tmp_path / "run")
    reporter = Reporter("r", directory, assembly, 0)
    reporter.start()
    reporter.log_steps(report(1, 2, 1.0))
    reporter.flush()
    reporter.close()
    assert not directory.path.exists() and capsys.readouterr().out == ""
    assert reporter.last["train/loss"] == 2.0  # but it knows what the others know


def test_the_load_of_many_steps_together():
    """Two experts that take turns: uneven in every step, even over all; the worst layer counts."""
    load = np.zeros((6, 2, 2), np.float32)
    load[::2, 0, 0] = load[1::2, 0, 1] = 1.0
    load[:, 1] = 0.75, 0.25
    window = load_window(np.arange(1, 7), load, length=4)
    assert window == {
        "steps": [3, 6],
        "max_violation_window": 0.5,
        "max_violation_mean": 1.0,
        "max_violation_sup": 1.0,
    }
    assert load_window(np.zeros(0, int), load[:0]) is None


def test_a_brief_run_is_told_once_that_it_is_not_judged(tmp_path):
    summary = dict.fromkeys(("checkpoint_step", "eval_bits_per_byte", "eval_bits_per_token"))
    summary |= {"status": "done", "steps": 6, "profile": None}
    summary["stability"] = dict.fromkeys(("router_z", "head_z"), "not judged: too short")
    words = closing_message(RunDirectory(tmp_path), summary, {})
    assert words.count("not judged") == 1 and "NOT bounded" not in words
