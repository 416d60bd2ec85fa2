# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The pipeline of a run in its report, from summary and configuration."""

from __future__ import annotations

import dataclasses
import pathlib

from experiments.recipes import RECIPES
from jaxmoe.configs import to_json
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporting.report import write_run_report
from sharding.mesh import MeshConfig
from sharding.pipeline import InterleavedConfig


def report(tmp_path, mesh, *, micro_batches=4, chunks=1, skipping=None):
    """Return the page of a run without metrics."""
    config = RECIPES["tiny"]()
    execution = dataclasses.replace(
        config.execution, mesh=mesh, pipeline=InterleavedConfig(chunks=chunks)
    )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=8),
        training=dataclasses.replace(
            config.training, accumulation=micro_batches, skipping=skipping
        ),
        execution=execution,
    )
    resolved = {axis: size for axis, size in mesh.resolve(8).by_axis.items() if size > 1}
    directory = RunDirectory(str(tmp_path))
    pathlib.Path(directory.metrics_file).write_text("")
    write_run_report(directory, "run", {"mesh": resolved}, "", to_json(config), {})
    return directory.report_file.read_text()


def test_the_report_shows_the_schedule(tmp_path):
    page = report(tmp_path, MeshConfig(stage=4, data=-1))
    assert (
        "Stages: 4 with 2 layers each; interleaved, 4 micro-batches: 43% of the time idle" in page
    )
    assert "at most 4 inputs kept" in page
    assert "\nstage 3  .  .  .  F0+B0 F1+B1 F2+B2 F3+B3" in page
    page = report(tmp_path, MeshConfig(stage=2, data=4), chunks=2)
    assert "Stages: 2 with 2 chunks of 2 layers each" in page and "F0b" in page


def test_a_long_timetable_is_left_out_of_the_report(tmp_path):
    page = report(tmp_path, MeshConfig(stage=2, data=4), micro_batches=256)
    assert "interleaved, 256 micro-batches" in page and "stage 0" not in page


def test_a_report_without_stages_has_no_pipeline(tmp_path):
    assert "Pipeline</h2>" not in report(tmp_path, MeshConfig(data=8))
