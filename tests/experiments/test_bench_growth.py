# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.bench growth`: its points, and the exponents; never how fast anything is."""

import json

import pytest

from experiments.bench import __main__ as bench
from experiments.bench.growth import exponent
from experiments.bench.growth_curves import CURVES, main

SMALL = {"files": 3, "text": 1, "loads": 2, "save": 1, "restore": 1, "experts": 1}


@pytest.mark.parametrize("name", [name for name in CURVES if name != "chips"])
def test_a_point_is_prepared_and_measured(name, tmp_path, capsys):
    arguments = [name, str(SMALL.get(name, 20)), str(tmp_path / "point")]
    main([*arguments, "prepare"])
    main(arguments)
    seconds, count = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert seconds >= 0.0 and count >= 0


def test_the_sizes_of_a_curve_rise_twice_or_more():
    for name, curve in CURVES.items():
        ratios = [b / a for a, b in zip(curve.sizes, curve.sizes[1:], strict=False)]
        assert len(ratios) == 2 and min(ratios) >= 2, name


@pytest.mark.parametrize(
    ("costs", "power"), [([3.0, 1.0, 1.0], 0), ([0, 1, 4], 1), ([0, 1, 16], 2)]
)
def test_the_exponent_is_that_of_the_last_two_points(costs, power):
    assert exponent([1, 4, 16], costs) == pytest.approx(power)
    assert exponent([1, 1, 1], costs) == 0.0


def test_a_wrong_curve_is_answered_with_the_right_one(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        bench.main(["growth", "--curves", "filesx", "--run.directory", str(tmp_path)])
    assert ended.value.code == 2
    assert "did you mean 'files'?" in capsys.readouterr().err


@pytest.mark.slow
def test_the_table_has_every_curve_asked_for(tmp_path, capsys):
    arguments = ["--divisor", "100", "--curves", "files", "queue", "chips"]
    assert bench.main(["growth", *arguments, "--run.directory", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert list(summary["curves"]) == ["files", "queue", "chips"]
    assert summary["curves"]["files"]["sizes"] == [5, 20, 80]
    out = capsys.readouterr().out
    assert "files: a warm start" in out and "exponents" in out
