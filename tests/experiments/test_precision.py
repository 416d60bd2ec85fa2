# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.precision`: what it refuses, what it writes, and a short run of it."""

import json
import math

import pytest

from experiments.studies import precision
from experiments.studies.precision import ARMS, PrecisionConfig, as_text
from jaxmoe.contrib.few_bits.halo import HaloConfig


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"arms": ("full", "int4-2")}, "there is no int4-2; there are full, int8-0"),
        ({"arms": ("full",)}, "name two or more, each once"),
        ({"steps": 0}, "steps=0 must be at least 1"),
    ],
)
def test_refusals(given, words):
    with pytest.raises(ValueError, match=words):
        PrecisionConfig(**given)


def test_arms_are_levels_of_halo():
    assert len(ARMS) == 7 and ARMS["float8-1"] == HaloConfig(dtype="float8_e4m3fn", level=1)


def test_a_wrong_flag_ends_with_two(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        precision.main(["--run.directory", str(tmp_path), "--arms", "full", "int3-0"])
    assert "int3-0" in capsys.readouterr().err


def test_the_tables_have_a_row_per_arm_and_per_parameter():
    text = as_text(
        {
            "nats": {"full": [2.0, 2.2], "int8-2": [2.1, 2.3]},
            "differences": {"int8-2": [0.1, 0.05]},
            "gradient_errors": {"int8-2": {"head/weight": 0.02}},
        }
    )
    assert [line.split()[0] for line in text.splitlines() if line] == [
        "arm",
        "full",
        "int8-2",
        "error",
        "head/weight",
    ]
    assert "+0.1000  +- 0.0500" in text


@pytest.mark.large
@pytest.mark.slow
@pytest.mark.trains
def test_a_short_run_in_few_bits_ends_beside_one_in_full_precision(tmp_path):
    """500 steps and 8 seeds are in experiments/README.md."""
    flags = ["--run.directory", str(tmp_path), "--arms", "full", "int8-2", "--seeds", "1"]
    assert precision.main([*flags, "--steps", "60", "--width", "32"]) == 0
    found = json.loads((tmp_path / "summary.json").read_text())
    (full,), (few,) = found["nats"].values()
    assert full < 3.0 < math.log(256)
    # A seed alone differs by up to .025 after 500 steps.
    assert 0.0 < abs(few - full) < 0.05
    errors = found["gradient_errors"]["int8-2"]
    # Some per cent of each product, and no gradient that is missing or turned.
    assert all(1e-3 < error < 0.35 for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.trains
def test_the_same_command_trains_only_missing_arms(tmp_path):
    flags = ["--run.directory", str(tmp_path), "--seeds", "1", "--steps", "2", "--width", "32"]
    assert precision.main([*flags, "--arms", "full", "int8-2"]) == 0
    first = (tmp_path / "trials.jsonl").read_text()
    assert precision.main([*flags, "--arms", "full", "int8-2", "int8-0"]) == 0
    again = (tmp_path / "trials.jsonl").read_text()
    assert again.startswith(first) and len(again.splitlines()) == 3
