# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run, their smoothing and bins, and the page that holds pictures."""

import base64
import json
import math
import re
import struct

import numpy as np
import pytest

from jaxmoe.tracking import (
    BITS_PER_BYTE,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOSS,
    JsonlTracker,
    RouterLoadRecorder,
    plot_run,
    plots,
    read_metrics,
    write_report,
)
from jaxmoe.tracking.plots import plot_router_load
from jaxmoe.tracking.smoothing import bin_means, smooth
from jaxmoe.tracking.tracker import BITS_PER_TOKEN


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.fixture
def made_up_run(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    recorder = RouterLoadRecorder(tmp_path / "router.npz")
    rng = np.random.default_rng(0)
    for step in range(1, 41):
        loss = math.nan if step == 5 else 1.5 + 4.0 * math.exp(-step / 10)
        numbers = {LOSS: loss, LEARNING_RATE: 1e-2, GRADIENT_NORM: 0.1 + 1 / step}
        if step % 20 == 0:
            numbers |= {BITS_PER_BYTE: 2.0, BITS_PER_TOKEN: 4.0}
        tracker.log(step, numbers)
        recorder.record(step, rng.integers(1, 9, size=(2, 4)))
    tracker.close()
    recorder.save()
    return tmp_path


@pytest.mark.parametrize(
    ("bytes_per_token", "unit", "held_out"),
    [(2.0, "bits per byte", [2.0, 2.0]), (None, "bits per token", [4.0, 4.0])],
)
def test_the_picture_of_the_loss_names_its_unit(
    bytes_per_token, unit, held_out, made_up_run, monkeypatch
):
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    plot_run(
        read_metrics(made_up_run / "metrics.jsonl"),
        made_up_run / "none.npz",
        made_up_run,
        bytes_per_token=bytes_per_token,
    )
    axes = figures[0].axes[0]
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert axes.get_ylabel() == unit and list(lines["held out"]) == held_out
    last_bits = (1.5 + 4.0 * math.exp(-4.0)) / math.log(2.0) / (bytes_per_token or 1.0)
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(last_bits)


def test_all_pictures_of_a_run(made_up_run):
    written = plot_run(
        read_metrics(made_up_run / "metrics.jsonl"),
        made_up_run / "router.npz",
        made_up_run / "plots",
        references={"order 1": 3.53, "order 2": 2.43, "order 2, again": 2.44},
    )
    assert [path.name for path in written] == ["loss.png", "router_load.png", "optimizer.png"]
    for path in written:
        width, height = png_size(path)
        assert 600 <= width <= 2000 and 300 <= height <= 2000
    # No router, no optimiser: only the loss.
    lines = (made_up_run / "metrics.jsonl").read_text().splitlines()
    short = [{k: v for k, v in json.loads(x).items() if k in ("step", LOSS)} for x in lines]
    (made_up_run / "short.jsonl").write_text("".join(json.dumps(x) + "\n" for x in short))
    short_series = read_metrics(made_up_run / "short.jsonl")
    written = plot_run(short_series, made_up_run / "none.npz", made_up_run / "p")
    assert [path.name for path in written] == ["loss.png"]


@pytest.mark.parametrize(("steps", "layers", "experts"), [(1, 1, 4), (3, 5, 8), (600, 32, 128)])
def test_router_pictures_of_any_size(tmp_path, steps, layers, experts):
    load = np.random.default_rng(0).dirichlet(np.ones(experts), size=(steps, layers))
    plot_router_load(tmp_path / "r.png", np.arange(steps), load)
    width, height = png_size(tmp_path / "r.png")
    assert 600 <= width <= 2400 and 300 <= height <= 3200


def test_bins_are_means_and_empty_ones_repeat():
    steps = np.array([0, 1, 2, 100])
    edges, means = bin_means(steps, np.array([[1.0], [2.0], [6.0], [8.0]]))
    assert edges.tolist() == [0, 25, 50, 75, 100]
    assert means[:, 0].tolist() == [3.0, 3.0, 3.0, 8.0]


def test_smoothing_keeps_lines_and_leaves_out_nan():
    line = np.arange(300.0)
    np.testing.assert_allclose(smooth(line)[3:-3], line[3:-3])
    line[7] = np.nan
    assert np.isfinite(smooth(line)).all()
    np.testing.assert_allclose(smooth(np.array([1.0])), [1.0])


def test_smoothing_is_a_mean_over_a_fiftieth_of_the_run():
    values = np.random.default_rng(0).normal(size=1001)
    values[[5, 500, 501]] = np.nan
    half = len(values) // 100
    wanted = [
        np.nanmean(values[max(0, place - half) : place + half + 1]) for place in range(len(values))
    ]
    np.testing.assert_allclose(smooth(values), wanted, rtol=0, atol=1e-12)


def test_the_report_is_one_page_by_itself(tmp_path):
    picture = tmp_path / "router_load.png"
    picture.write_bytes(b"\x89PNG picture")
    write_report(
        tmp_path / "report.html",
        title="tiny <1>",
        summary={"status": "done", "tokens": 1_638_400, "final_loss": 1.36112, "mesh": {"data": 8}},
        plots=[picture],
        samples="if a < b & c:",
        config={"model": {"top_k": 2}},
    )
    page = (tmp_path / "report.html").read_text()
    assert "<title>tiny &lt;1&gt;</title>" in page
    assert base64.b64encode(b"\x89PNG picture").decode() in page
    assert "if a &lt; b &amp; c:" in page and "&quot;top_k&quot;: 2" in page
    for value in ("1,638,400", "1.361", "data 8", "Router load"):
        assert value in page
    assert "prefers-color-scheme: dark" in page and "<script" not in page
    assert not re.search(r'(src|href)="(?!data:)|url\(|@import', page)


def test_a_run_on_its_own_answers_has_a_picture_of_their_rewards(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 4):
        tracker.log(step, {"rl/reward": 0.2 * step, "rl/solved": 0.1 * step, "rl/length": 3.0})
    tracker.close()
    series = read_metrics(tmp_path / "metrics.jsonl")
    (written,) = plot_run(series, tmp_path / "router.npz", tmp_path)
    assert written.name == "rewards.png" and written.read_bytes().startswith(b"\x89PNG")
