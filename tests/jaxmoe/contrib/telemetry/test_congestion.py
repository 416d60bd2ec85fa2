# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""gamma_eff over training: estimates of a planted coefficient, resume, phases, the report."""

import numpy as np
import pytest

from jaxmoe.contrib.telemetry.congestion import EVERY, equilibrium
from jaxmoe.contrib.telemetry.pictures import congestion_section
from jaxmoe.contrib.telemetry.recorders import CongestionRecorder, phases
from jaxmoe.tracking import write_report
from jaxmoe.tracking.history import read_history


def planted(gamma, seed):
    """Return load and quality [2 E] of a step whose routers have this coefficient."""
    quality = np.log(np.random.default_rng(0).dirichlet(np.full(8, 2.0), size=2))
    noise = np.random.default_rng(seed).normal(size=(2, 2, 8))
    load = equilibrium(quality + 0.1 * noise[0], np.full(2, gamma))
    return load * np.exp(0.02 * noise[1]), quality + 0.1 * noise[0]


def record(recorder, steps, gamma=lambda step: 10.0):
    return {step: recorder.record(step, *planted(gamma(step), step)) for step in steps}


def test_gamma_eff_of_a_run_is_recorded_with_its_interval(tmp_path):
    recorder = CongestionRecorder(tmp_path / "congestion.npz")
    found = record(recorder, range(1, 2 * EVERY + 1))
    assert [step for step, values in found.items() if values] == [EVERY, 2 * EVERY]
    assert set(found[EVERY]) == {f"router/gamma_eff{end}" for end in ("", "_low", "_high")}
    recorder.save()
    steps, series = read_history(tmp_path / "congestion.npz")
    assert steps.tolist() == [EVERY, 2 * EVERY] and series["gamma_eff"].shape == (2, 2)
    assert (series["gamma_eff_low"] <= series["gamma_eff"]).all()
    assert (series["gamma_eff"] <= series["gamma_eff_high"]).all()
    np.testing.assert_allclose(series["gamma_eff"], 10.0, rtol=0.2)
    again = CongestionRecorder(tmp_path / "congestion.npz", EVERY)
    assert record(again, range(EVERY + 1, 2 * EVERY + 1))[2 * EVERY] == found[2 * EVERY]


def test_a_stronger_coefficient_is_found_larger(tmp_path):
    recorder = CongestionRecorder(tmp_path / "congestion.npz")
    found = record(recorder, range(1, 2 * EVERY + 1), lambda step: 5.0 if step <= EVERY else 30.0)
    assert found[EVERY]["router/gamma_eff_high"] < found[2 * EVERY]["router/gamma_eff_low"]


def test_steps_without_quality_are_no_record(tmp_path):
    recorder = CongestionRecorder(tmp_path / "congestion.npz")
    load, quality = planted(1.0, 0)
    for given in ((None, None), (load, None), (load, quality[:, :4]), (0.0 * load, quality)):
        assert recorder.record(EVERY, *given) == {}
    recorder.save()
    assert not (tmp_path / "congestion.npz").exists()


STEPS = 10 * np.arange(1, 9)
GAMMA = np.array([14.0, 20.0, 36.0, 35.0, 36.0, 27.0, 15.0, 9.0])


@pytest.mark.parametrize(
    ("gamma", "wanted"),
    [
        (
            GAMMA,
            [("surge", 10, 30), ("stabilization", 30, 50), ("relaxation", 50, 80)],
        ),
        (GAMMA[:3], [("surge", 10, 30)]),
        (GAMMA[5:], [("relaxation", 10, 30)]),
        (GAMMA[:1], []),
    ],
)
def test_phases_of_a_run(gamma, wanted):
    found = phases(STEPS[: len(gamma)], gamma, gamma - 1.0, gamma + 1.0)
    assert [(phase.name, phase.first, phase.last) for phase in found] == wanted
    if found:
        assert found[-1].end == (gamma[-1], gamma[-1] - 1.0, gamma[-1] + 1.0)


def test_the_report_shows_the_phases_with_intervals(tmp_path):
    columns = np.stack([GAMMA, GAMMA[::-1]], axis=1)
    series = {"gamma_eff": columns, "gamma_eff_low": columns - 1, "gamma_eff_high": columns + 1}
    metrics = {"indicators/direction_coupling": (STEPS, np.linspace(0.0, 0.4, 8))}
    path = tmp_path / "report.html"
    section = congestion_section(metrics, STEPS, series)
    write_report(path, title="t", summary={}, metrics=metrics, more_sections=(section,))
    page = path.read_text()
    assert "Congestion of the routers" in page and "gates neurons" not in page
    for cell in ("surge", "10 to 30", "14 (13 to 15)", "36 (35 to 37)", "relaxation", "50 to 80"):
        assert f"<td>{cell}</td>" in page, cell
    assert "router row and its expert&#x27;s gate neurons" in page
    write_report(path, title="t", summary={}, metrics=metrics)
    assert "Congestion of the routers" not in path.read_text()
