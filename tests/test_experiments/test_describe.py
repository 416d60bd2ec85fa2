# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes fit their data and their own rules, and are described without a device."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from experiments import describe
from experiments.assembly import make_plan
from experiments.recipes import RECIPES
from jaxmoe.data import evaluation_batches

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_data(name):
    config = RECIPES[name]()
    plan = make_plan(config)
    source = config.data.build(config.training.seed)
    assert source.vocab_size <= plan.model.vocab_size
    assert config.training.batch_size % config.training.accumulation == 0
    evaluation_batches(  # too little held-out data is an error here
        source,
        batch_size=config.training.batch_size,
        sequence_length=config.training.sequence_length,
        num_batches=config.evaluation.batches,
    ).close()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_how_it_is_run(name):
    text = RECIPES[name].__doc__
    assert text.splitlines()[0].endswith(".")
    command = "python -m experiments.pretrain" + ("" if name == "tiny" else f" {name}")
    assert command in [line.strip() for line in text.splitlines()]


def page(capsys, *argv):
    """Lines before the table, by their first word."""
    assert describe.main(argv) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    return {line.split()[0]: line for line in lines}


def test_the_page_of_a_large_model(capsys):
    lines = page(capsys, "qwen3_30b_a3b")
    assert lines["parameters"].split()[1:] == [
        "30,532,122,624",
        "total,",
        "3,353,032,704",
        "active",
    ]
    # 12 and 4 bytes for each.
    assert "366.4 GB parameters and optimizer, 122.1 GB gradients" in lines["memory"]


def test_moments_stay_wide_when_parameters_are_narrow(capsys):
    """2 + 8 bytes and 2 for each of 913,452,032, on 8 devices."""
    flags = ("--execution.precision.parameters", "bfloat16", "--execution.mesh.data", "8")
    memory = page(capsys, "d8", *flags)["memory"]
    # Gains, 1 part in 50,000, are whole on every device.
    assert "1.1 GB parameters and optimizer, 228.4 MB gradients" in memory


def test_no_device_and_no_reader():
    """A platform that is not there would fail when asked for; `describe | head` is no failure."""
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "experiments.describe", "mixtral_8x7b"]
    reading, writing = os.pipe()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(writing)
        os.close(reading)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
