# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The watches in a run: who is named, in which words, once; whole runs are in tests/faults."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.doctor.devices import tiny_config
from jaxmoe.contrib.telemetry.gradients import (
    COSINE,
    GradientComparison,
    GradientComparisonConfig,
    GradientHook,
    WorkerGradients,
)
from jaxmoe.resilience.goodput import read_ledger
from jaxmoe.resilience.processes_config import ProcessesConfig
from jaxmoe.resilience.watchdog import Watchdog
from jaxmoe.run.assemble import assemble
from jaxmoe.run.config import TrackingConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import make_parts
from jaxmoe.run.reporter import Reporter
from jaxmoe.run.supervision import Watches, library_supervision
from jaxmoe.tracking import read_metrics
from jaxmoe.training.loop import Report
from jaxmoe.training.parts.worker_losses import LOSS_RANGE, LOSS_STD
from jaxmoe.training.step import StepMetrics
from jaxmoe.training.stopwatch import Stopwatch


@pytest.fixture
def watched(tmp_path):
    """Makes the watches of a run on 8 devices, its directory, and what it is assembled from."""
    with contextlib.ExitStack() as stack:

        def make():
            config = tiny_config(8)
            training = dataclasses.replace(config.training, steps=40)
            tracking = TrackingConfig(console="plain", trackers=())
            parts = (GradientComparisonConfig(every=10, groups=4),)
            config = dataclasses.replace(config, training=training, tracking=tracking, parts=parts)
            assembly, directory = assemble(config), RunDirectory(tmp_path)
            reporter = stack.enter_context(
                contextlib.closing(Reporter("r", directory, assembly, 0))
            )
            watchdog = Watchdog(ProcessesConfig())
            watches = Watches(directory, assembly, reporter, Stopwatch("start"), 0, watchdog)
            return watches, directory, assembly

        yield make


def _report(step: int, losses: np.ndarray) -> Report:
    metrics = StepMetrics(
        loss=jnp.float32(2.0),
        losses={},
        grad_norm=jnp.float32(0.5),
        num_tokens=jnp.float32(128.0),
        is_skipped=jnp.bool_(False),
        skipped_in_a_row=jnp.int32(0),
        router={},
        load=None,
        worker_loss=jnp.asarray(losses, jnp.float32),
    )
    return Report(steps=(step,), metrics=(jax.device_get(metrics),), seconds=1.0)


def test_a_worker_that_differs_is_named_with_its_devices(watched, capsys):
    watches, directory, assembly = watched()
    workers = assembly.execution.mesh.batch_shards
    assert workers > 2
    rng = np.random.default_rng(0)
    for step in range(1, 41):
        losses = 2.0 + 0.05 * rng.standard_normal(workers)
        losses[1] += 1.0 * (step > 10)
        watches.report_steps(_report(step, losses))
    (warning,) = watches.warnings
    assert f": worker 1 of {workers} (devices " in warning and "its loss by +" in warning
    assert capsys.readouterr().out.count(warning.partition(": ")[2]) == 1
    series = read_metrics(directory.metrics_file)
    assert series[LOSS_RANGE][1][20] > 0.8 and series[LOSS_STD][0].tolist() == list(range(1, 41))
    assert read_ledger(directory.goodput_file)[-1].step == 40


def test_gradients_are_compared_and_judged(watched, capsys):
    """By a hook of the run; here with norms in place of the program that finds them."""
    watches, directory, assembly = watched()
    config = assembly.plan.config
    with library_supervision(config.timeouts) as supervision:
        (part,) = (
            part
            for part in make_parts(config, directory, supervision)
            if isinstance(part, GradientComparison)
        )
    (hook,) = part.hooks(assembly, watches)
    assert isinstance(hook, GradientHook)
    assert [step for step in range(1, 41) if hook.is_due(step)] == [10, 20, 30]
    found = WorkerGradients(
        loss=np.ones(4), norm=np.array([1.0, 1.1, 0.9, 7.0]), cosine=0.5, cosine_from_sums=0.4
    )
    hook._probe, hook._batch = (lambda state, batch: found), (lambda step: None)
    for step in (10, 20, 30, 40):
        hook.run(step, None)
    (warning,) = watches.warnings
    assert warning.startswith("step 40: worker 3 of 4 (devices ") and "gradient norm" in warning
    assert read_metrics(directory.metrics_file)[COSINE][1].tolist() == [0.5] * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"every": -1}, "gradient_comparison.every=-1 must be above 0"),
        ({"groups": 1}, "gradient_comparison.groups=1 must be at least 2"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        GradientComparisonConfig(**given)
