# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Verdicts on series: bounded over training, not growing with size; and the files behind them."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxmoe.contrib.telemetry.pictures import indicators_of_run
from jaxmoe.contrib.telemetry.recorders import IndicatorRecorder, over_layers, scalars_of
from jaxmoe.contrib.telemetry.stability import (
    Course,
    is_bounded,
    is_non_increasing,
    judge_run,
    judge_sizes,
)
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporting.compare import compare_runs
from jaxmoe.run.reporting.recorded import RecordedRun
from jaxmoe.tracking.history import MAX_RECORDS, read_history
from jaxmoe.tracking.tracker import LOSS, TRAINED_TOKENS

STEPS = np.linspace(0.0, 1.0, 200)
NOISE = np.random.default_rng(0).normal(size=200)

BOUNDED = {
    "flat": np.full(200, 3.0),
    "zeros": np.zeros(200),
    "noisy": 5.0 + 0.5 * NOISE,
    "falling": 5.0 - 2.0 * STEPS + 0.1 * NOISE,
    "settling": 4.0 + 2.0 * np.exp(-10.0 * STEPS) + 0.05 * NOISE,
    "rose_early": 4.0 - 3.0 * np.exp(-20.0 * STEPS) + 0.05 * NOISE,
    "rises_by_less_than_the_limit": 5.0 + 0.1 * STEPS,
}
UNBOUNDED = {
    "rising": 1.0 + 3.0 * STEPS + 0.1 * NOISE,
    "rising_late": 1.0 + np.maximum(0.0, STEPS - 0.6),
    "spike": np.where(np.arange(200) == 90, 50.0, 5.0),
    "collapsed": np.where(STEPS < 0.5, 3.0, 0.0),
}


@pytest.mark.parametrize("values", BOUNDED.values(), ids=BOUNDED)
def test_bounded(values):
    assert is_bounded(values).holds, is_bounded(values).explanation


@pytest.mark.parametrize("values", UNBOUNDED.values(), ids=UNBOUNDED)
def test_not_bounded(values):
    assert not is_bounded(values).holds, is_bounded(values).explanation


def test_the_numbers_and_their_words():
    values = np.concatenate([np.full(100, 8.0), 4.0 + 2.0 * np.linspace(0.0, 1.0, 100)])
    course = Course.of(values)
    assert course.peak == 8.0 and course.plateau == pytest.approx(np.median(values[-20:]))
    assert course.rise == pytest.approx(2.0 / course.plateau) and course.error < 1e-9
    words = is_bounded(values).explanation
    assert "peak 8, plateau 5.808 (ratio 1.38, must be below 2)" in words and "(rises)" in words


@hypothesis.given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 1000), rise=st.floats(0.3, 2.0))
def test_properties(scale, seed, rise):
    """Units do not matter; noise without a trend is bounded; a clear trend is seen through it."""
    noise = 0.05 * np.random.default_rng(seed).normal(size=400).clip(-3.0, 3.0)
    line = np.linspace(0.0, 1.0, 400)
    for values in (1.0 + noise, 1.0 + noise + rise * line):
        assert is_bounded(scale * values).holds == is_bounded(values).holds
    assert not is_bounded(1.0 + noise + rise * line).holds
    # The share of false alarms is that of three standard errors, and the rise is small as well.
    assert is_bounded(1.0 + noise).holds


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.ones(19), "a series of 19 values is too short to be judged: 20 at least"),
        (np.append(np.ones(30), np.nan), "must be finite and not negative"),
        (np.append(np.ones(30), -1.0), "must be finite and not negative"),
    ],
)
def test_what_cannot_be_judged(values, text):
    with pytest.raises(ValueError, match=text):
        is_bounded(values)


def test_sizes():
    plateau = {"8": 3.0, "12": 2.0, "16": 2.09}
    series = {name: np.full(50, value) for name, value in plateau.items()}
    verdict = is_non_increasing(series)
    assert verdict.holds and verdict.explanation == "plateaus 8: 3, 12: 2, 16: 2.09; does not grow"
    grown = is_non_increasing({**series, "20": np.full(50, 2.3)})
    assert not grown.holds and grown.explanation.endswith("grows from 16 to 20")
    with pytest.raises(ValueError, match="1 size cannot be compared"):
        is_non_increasing({"8": np.ones(50)})


def test_a_run_is_judged_by_the_indicators_it_has():
    verdicts = judge_run({"router_z": np.ones(50), "head_z": np.ones(5), "other": np.ones(50)})
    assert list(verdicts) == ["router_z", "head_z"]
    assert verdicts["router_z"].holds and verdicts["head_z"].holds is None
    assert verdicts["head_z"].explanation.startswith("a series of 5 values")


def test_runs_of_several_sizes_are_judged_by_the_indicators_that_all_have():
    small = {"router_z": np.full(50, 2.0), "head_z": np.ones(50), "other": np.ones(50)}
    large = {"router_z": np.full(50, 2.2), "head_z": np.ones(5), "attention_z": np.ones(50)}
    verdicts = judge_sizes({"small": small, "large": large})
    assert list(verdicts) == ["router_z", "head_z"]
    assert not verdicts["router_z"].holds and verdicts["head_z"].holds is None
    assert verdicts["router_z"].explanation.endswith("grows from small to large")


# The files.


def row(step):
    return {
        "attention_z": np.array([step, 2.0 * step, 3.0 * step]),
        "router_z": np.array([np.nan, 1.0, step]),
        "router_max_logit": np.array([np.nan, -1.0, step]),
        "update_ratio/head": np.array([0.5]),
        "update_ratio/none": np.array([np.nan]),
    }


def test_records_are_saved_and_resumed(tmp_path):
    path = tmp_path / "indicators.npz"
    recorder = IndicatorRecorder(path)
    recorder.save()
    assert not path.exists()
    for step in (1, 2, 3, 4):
        recorder.record(step, row(step))
    recorder.record(5, {})
    recorder.save()
    resumed = IndicatorRecorder(path, 2)
    resumed.record(3, row(30))
    resumed.save()
    steps, series = read_history(path)
    assert steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(series["router_z"][:, 1:], [[1, 1], [1, 2], [1, 30]])
    assert series["update_ratio/head"].shape == (3, 1)


def test_long_histories_are_thinned_and_a_damaged_file_is_a_warning(tmp_path, caplog):
    path = tmp_path / "indicators.npz"
    recorder = IndicatorRecorder(path)
    for step in range(MAX_RECORDS + 1):
        recorder.record(step, {"x": np.zeros(1)})
    recorder.save()
    assert len(read_history(path)[0]) == MAX_RECORDS // 2 + 1
    path.write_bytes(b"no archive")
    steps, series = read_history(path)
    assert not steps.size and not series and "is not readable" in caplog.text


def test_one_number_for_all_layers():
    scalars = scalars_of(row(4.0))
    assert scalars == {
        "indicators/attention_z": 8.0,
        "indicators/router_z": 2.5,
        "indicators/router_max_logit": 4.0,
        "indicators/update_ratio/head": 0.5,
    }
    assert np.isnan(over_layers("x", np.full((2, 3), np.nan))).all()


def test_the_picture(tmp_path):
    recorder = IndicatorRecorder(tmp_path / "indicators.npz")
    for step in range(1, 30):
        recorder.record(step, row(step))
    recorder.save()
    (tmp_path / "plots").mkdir()
    assert 'alt="Indicators"' in indicators_of_run(RunDirectory(tmp_path), {})
    written = tmp_path / "plots" / "indicators.png"
    assert written.name == "indicators.png" and written.read_bytes().startswith(b"\x89PNG")


def recorded(path, size, value):
    """A run of a size, whose indicators have had a value since its first step."""
    path.mkdir()
    recorder = IndicatorRecorder(path / "indicators.npz")
    for step in range(1, 30):
        recorder.record(step, {"router_z": np.array([value]), "router_max_logit": np.ones(1)})
    recorder.save()
    steps = np.arange(1, 30)
    return RecordedRun(
        directory=RunDirectory(path),
        config={"model": {"num_layers": size}},
        summary={"parameters_total": size, "model_flops_per_token": 1.0, "bytes_per_token": 1.0},
        series={LOSS: (steps, np.ones(29)), TRAINED_TOKENS: (steps, 10.0 * steps)},
        notes=(),
    )


def test_a_page_on_runs_of_several_sizes_says_which_indicators_grow(tmp_path):
    large, small = recorded(tmp_path / "a", 2000, 1.2), recorded(tmp_path / "b", 1000, 1.0)
    page = compare_runs((large, small), str(tmp_path / "page")).report_file.read_text()
    assert "Indicators by the size of the model" in page
    assert "plateaus b (1k): 1, a (2k): 1.2; grows from b (1k) to a (2k)" in page
    assert page.count("<td>GROWS</td>") == 1 and page.count("<td>does not grow</td>") == 1
    again = recorded(tmp_path / "c", 1000, 1.2)
    page = compare_runs((small, again), str(tmp_path / "again")).report_file.read_text()
    assert "Indicators by the size" not in page
