# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Run` as a notebook uses it: train, leave and resume, evaluate, generate, report, open."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pathlib
import signal
import threading

import jax
import numpy as np
import pytest

import jaxmoe
from experiments import recipes
from jaxmoe import messages
from jaxmoe.data import MarkovConfig
from jaxmoe.errors import ConfigurationError, JaxmoeError
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import LinearConfig
from jaxmoe.run import Run, TrainedStep
from jaxmoe.run.config import CheckpointConfig, EvaluationConfig, PretrainConfig, TrackingConfig
from jaxmoe.run.supervision import library_supervision
from tests.support.runs import logged_losses, saved_leaves, start_run, written_by

STEPS = 6


def config() -> PretrainConfig:
    """A run of which compiling takes longer than training."""
    return dataclasses.replace(
        recipes.markov(steps=STEPS, batch_size=8, sequence_length=16),
        model=ModelConfig(
            vocab_size=8,
            num_layers=1,
            embed_dim=16,
            attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=16),
            moe=MoEConfig(num_experts=4, top_k=2, expert_dim=16),
        ),
        data=MarkovConfig(),
        schedule=LinearConfig(warmup_steps=2),
        evaluation=EvaluationConfig(every=3, batches=2),
        checkpoint=CheckpointConfig(every=4),
        tracking=TrackingConfig(trackers=(), sample_length=0),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A configuration and its finished run on 8 devices."""
    given = config()
    run = Run(given, tmp_path_factory.mktemp("runs") / "whole")
    result = run.train()
    assert (result.status, result.step, result.checkpoint_step) == ("done", STEPS, STEPS)
    assert result.summary["mesh"] == {"data": 8}
    return given, run


def test_left_interrupted_and_threaded_run_equals_whole_bitwise(trained, tmp_path, monkeypatch):
    given, whole = trained
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"ended with {code}"))
    run, steps = Run(given, tmp_path / "parts"), []
    handler = signal.getsignal(signal.SIGINT)
    for step in run.steps():
        assert isinstance(step, TrainedStep)
        assert jax.sharding.get_abstract_mesh().empty  # the mesh of the run stays inside
        steps.append((step.step, step.loss))
        if step.step == 2:
            break
    assert signal.getsignal(signal.SIGINT) is handler
    assert run.result is not None and run.result.status == "interrupted"
    assert (run.result.step, run.result.checkpoint_step) == (2, 2)
    # A second Ctrl-C is an exception in the loop.
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        for step in run.steps():
            steps.append((step.step, step.loss))
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler
    assert (run.result.status, run.result.checkpoint_step) == ("interrupted", 3)
    # Outside of the main thread there are no signals.
    thread = threading.Thread(target=lambda: steps.extend((s.step, s.loss) for s in run.steps()))
    thread.start()
    thread.join()
    assert run.result.status == "done"
    losses = logged_losses(whole.directory.path)
    assert dict(steps) == pytest.approx(losses, abs=0) and list(losses) == [*range(1, STEPS + 1)]
    assert logged_losses(run.directory.path) == losses
    wanted = saved_leaves(whole.directory.path, STEPS)
    for path, leaf in saved_leaves(run.directory.path, STEPS).items():
        np.testing.assert_array_equal(leaf, wanted[path], err_msg=path)


def test_evaluate_equals_the_logged_value(trained, caplog):
    _, run = trained
    steps, values = run.metrics()["eval/bits_per_token"]
    assert steps.tolist() == [3, 6]
    found = run.evaluate()
    assert (found.step, found.bits_per_token, found.bits_per_byte) == (6, values[-1], None)
    opened = Run.open(run.directory.path)
    with caplog.at_level(logging.WARNING):
        assert opened.evaluate() == found
    assert not caplog.records  # Orbax warns of directories that are read only
    assert run.evaluate(step=4).step == 4 and run.evaluate() == found
    summary = run.summary()
    assert summary is not None and summary["eval_bits_per_token"] == found.bits_per_token


def test_generate_report_and_open(trained):
    _, run = trained
    sample = run.generate("1 2", length=4, temperature=0.0)
    assert sample.prompt == "1 2" and len(sample.text.split()) == 4
    opened = Run.open(run.directory.path)
    assert opened.name == run.directory.path.name
    assert opened.generate("1 2", length=4, temperature=0.0) == sample
    page = run.directory.report_file
    page.unlink()
    (run.directory.plots_directory / "loss.png").unlink()
    assert run.report() == page and page.stat().st_size > 0
    assert (run.directory.plots_directory / "loss.png").exists()
    before = run.directory.summary_file.read_bytes()
    result = opened.train()
    assert (result.status, result.step) == ("done", STEPS)
    assert run.directory.summary_file.read_bytes() == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.generate("def "), "prompt='def ': 'def' is not a token of this language"),
        (lambda run: run.generate("1", length=0), "length=0 must be at least 1"),
        (lambda run: run.generate(""), "prompt is empty"),
        (lambda run: run.evaluate(step=5), "5"),
        (lambda run: Run.open(run.directory.path / "none"), "holds no run"),
        (
            lambda run: Run(recipes.markov(steps=30), run.directory.path).train(),
            "belongs to a run with another config",
        ),
    ],
)
def test_bad_input_raises_one_class(trained, call, message):
    _, run = trained
    with pytest.raises(ConfigurationError, match=message) as raised:
        call(run)
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, JaxmoeError)


ON_ONE_DEVICE = """
import sys
from jaxmoe.run import Run
from tests.jaxmoe.run.test_run import config

run = Run(config(), sys.argv[1])
for step in run.steps():
    if step.step == 2:
        break
assert run.result.status == "interrupted"
result = Run.open(sys.argv[1]).train()
assert result.summary["mesh"] == {"devices": 1} and result.summary["goodput"]["starts"] == 2
assert run.evaluate().bits_per_token == run.metrics()["eval/bits_per_token"][1][-1]
print(run.generate("1 2", length=4).text, run.report())
"""


@pytest.mark.slow
@pytest.mark.trains
def test_script_on_one_device(tmp_path):
    process = start_run([str(tmp_path / "run")], ON_ONE_DEVICE)
    (output,) = written_by(process)
    assert process.returncode == 0, output
    assert "compiled in" in output and "held out at step 6" in output  # without logging set up


LEFT_AT_THE_END = """
import sys
from jaxmoe.run import Run
from tests.jaxmoe.run.test_run import config

steps = Run(config(), sys.argv[1]).steps()
print(*(next(steps).step for _ in range(3)))
"""


@pytest.mark.slow
@pytest.mark.trains
def test_program_that_ends_amid_its_steps_saves_the_last(tmp_path):
    process = start_run([str(tmp_path / "run")], LEFT_AT_THE_END)
    (output,) = written_by(process)
    assert process.returncode == 0, output
    assert "1 2 3" in output and "Traceback" not in output and "ignored in" not in output
    summary = Run.open(tmp_path / "run").summary()
    assert summary is not None and (summary["status"], summary["steps"]) == ("interrupted", 3)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]
    assert saved_leaves(tmp_path / "run", 3)["['step']"] == 3


def test_library_neither_watches_nor_ends_its_process():
    watchdogs = [t for t in threading.enumerate() if t.name == "watchdog"]
    with library_supervision(config().timeouts) as supervision:
        assert [t for t in threading.enumerate() if t.name == "watchdog"] == watchdogs
        supervision.watchdog.fail(RuntimeError("raised, not ended"))
    ends = [
        path.name
        for path in pathlib.Path(jaxmoe.__file__).parent.rglob("*.py")
        if "os._exit" in path.read_text()
    ]
    assert ends == ["watchdog.py"]


def test_messages_are_printed_without_logging_set_up(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr(messages.logger, "handlers", [])
    monkeypatch.setattr(messages.logger, "propagate", True)
    messages.logger.setLevel(logging.NOTSET)
    with messages.show_messages():
        messages.write("one")
    messages.write("two")
    assert stream.getvalue() == "one\n" and messages.logger.handlers == []


def test_recipes_take_training_fields():
    assert recipes.tiny().training.steps == 300
    changed = recipes.tiny(steps=200, batch_size=4)
    assert (changed.training.steps, changed.training.batch_size) == (200, 4)
    assert changed.model == recipes.tiny().model
