# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records of a run with detailed telemetry, and none of another."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.doctor.devices import tiny_config
from jaxmoe.contrib.telemetry.part import Telemetry, judge_indicators
from jaxmoe.contrib.telemetry.recorders import CONGESTION, INDICATORS
from jaxmoe.run.assemble import assemble
from jaxmoe.run.config import TrackingConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import make_parts
from jaxmoe.run.reporter import Reporter
from jaxmoe.run.restore import StartingPoint
from jaxmoe.run.supervision import Watches, library_supervision
from jaxmoe.tracking import read_metrics
from jaxmoe.tracking.history import read_history
from jaxmoe.training.loop import Report
from jaxmoe.training.state import TrainState
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


def _telemetry(assembly, directory):
    config = assembly.plan.config
    with library_supervision(config.timeouts) as supervision:
        parts = make_parts(config, directory, supervision)
    return [part for part in parts if isinstance(part, Telemetry)]


def _begin(part, assembly, step, reporter):
    """Open the records after a number of steps; the part reads neither state nor comparisons."""
    state, watches = (mock.create_autospec(kind, instance=True) for kind in (TrainState, Watches))
    watches.reporter = reporter
    part.begin(assembly, step, state, watches)


def _detailed(assembly):
    config = assembly.plan.config
    execution = dataclasses.replace(config.execution, telemetry="detailed")
    config = dataclasses.replace(config, execution=execution)
    plan = dataclasses.replace(assembly.plan, config=config)
    return dataclasses.replace(assembly, plan=plan)


def test_detailed_runs_keep_their_indicators(assembly, tmp_path):
    directory = RunDirectory(tmp_path)
    (part,) = _telemetry(_detailed(assembly), directory)
    reporter = Reporter("r", directory, assembly, 0)
    _begin(part, assembly, 0, reporter)
    given = report(1, 20, 1.0)
    layers = {"router_z": np.array([np.nan, 2.0, 4.0]), "head_z": np.array([9.0])}
    load, quality = np.array([[0.4, 0.3, 0.2, 0.1]]), np.log([[0.4, 0.3, 0.2, 0.1]])
    detailed = tuple(
        dataclasses.replace(m, load=load, measures={"indicators": layers, "quality": quality})
        for m in given.metrics
    )
    reporter.log_steps(dataclasses.replace(given, metrics=detailed))
    reporter.close()
    steps, series = read_history(directory.path / INDICATORS)
    assert steps.tolist() == list(range(1, 21)) and series["router_z"].shape == (20, 3)
    metrics = read_metrics(directory.metrics_file)
    assert metrics["indicators/router_z"][1].tolist() == [3.0] * 20
    steps, congestion = read_history(directory.path / CONGESTION)
    assert steps.tolist() == [10, 20] == metrics["router/gamma_eff"][0].tolist()
    np.testing.assert_allclose(congestion["gamma_eff"], 0.0, atol=1e-3)  # the load is the quality
    said = part.rows()["stability"]
    assert set(said) == {"router_z", "head_z"} and said["head_z"].startswith("bounded: peak 9")


def test_a_run_that_goes_back_records_each_step_once(assembly, tmp_path):
    directory = RunDirectory(tmp_path)
    (part,) = _telemetry(_detailed(assembly), directory)
    reporter = Reporter("r", directory, assembly, 0)

    def log(first, last):
        steps = report(first, last, 1.0)
        measures = {"indicators": {"router_z": np.array([float(first)])}}
        metrics = (dataclasses.replace(m, measures=measures) for m in steps.metrics)
        reporter.log_steps(dataclasses.replace(steps, metrics=tuple(metrics)))

    _begin(part, assembly, 0, reporter)
    log(1, 20)
    part.restore(mock.create_autospec(StartingPoint, instance=True))
    reporter.go_back(10)
    _begin(part, assembly, 10, reporter)
    log(11, 20)
    reporter.close()
    steps, series = read_history(directory.path / INDICATORS)
    assert steps.tolist() == list(range(1, 21))
    assert series["router_z"][:, 0].tolist() == [1.0] * 10 + [11.0] * 10


def test_brief_runs_have_no_such_file(assembly, tmp_path):
    directory = RunDirectory(tmp_path)
    assert _telemetry(assembly, directory) == [] and judge_indicators(directory) == {}
    (directory.path / INDICATORS).write_bytes(b"records of an earlier start")
    (part,) = _telemetry(assembly, directory)
    reporter = Reporter("r", directory, assembly, 2)
    _begin(part, assembly, 2, reporter)
    reporter.log_steps(report(3, 4, 1.0))
    reporter.close()
    assert not (directory.path / CONGESTION).exists() and "stability" not in part.rows()
