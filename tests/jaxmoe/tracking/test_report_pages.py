# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The HTML pages: charts, the load map, the page of a run, the comparison of runs."""

from __future__ import annotations

import base64
import html.parser
import json
import math
import re
import struct
import zlib

import numpy as np
import pytest

from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporting.recorded import RecordedRun
from jaxmoe.run.reporting.report import rebuild_report
from jaxmoe.tracking import load_map, write_report
from jaxmoe.tracking.charts import Line, line_chart, plain_number, with_smoothed
from jaxmoe.tracking.comparison import (
    AXES,
    ComparedRun,
    at_equal_cost,
    bits_unit,
    final_numbers,
    write_comparison,
)
from jaxmoe.tracking.report import bits_of_training, held_out, learnt, training_bits
from jaxmoe.tracking.smoothing import thin_curve
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOAD_BALANCE,
    LOAD_ENTROPY,
    LOSS,
    MAX_VIOLATION,
    ROUTER_ENTROPY,
    TRAINED_SECONDS,
    TRAINED_TOKENS,
)

STEPS = np.arange(1, 41)
EVIL = "<script>alert('&')</script>"


class Balanced(html.parser.HTMLParser):
    """Fails where a tag is closed that was not the last to be opened."""

    ALONE = {"meta", "img", "input", "path", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.scripts = [], 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()


def check_page(page: str) -> Balanced:
    """Well formed, with nothing to fetch and nothing from the run taken for HTML."""
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r'(?:src|href)="(?!data:|#)|url\(|@import|https?://', page)
    assert EVIL not in page
    return parser


# --- charts ---


def test_thinning_keeps_spikes_ends_and_order():
    x = np.arange(10_000)
    y = np.sin(x / 500.0)
    y[3456], y[7890] = 50.0, np.nan
    few_x, few_y = thin_curve(x, y, 300)
    assert len(few_x) <= 302 and np.all(np.diff(few_x) > 0)
    assert few_x[0] == 0 and few_x[-1] == 9999 and 50.0 in few_y and np.isfinite(few_y).all()
    short_x, short_y = thin_curve(x[:5], y[:5], 300)
    np.testing.assert_array_equal(short_y, y[:5])


def curves(chart: str, kind: str) -> list[np.ndarray]:
    """Points of the curves of a class, [n, 2]."""
    found = re.findall(rf'<g class="{kind}"><path d="([^"]+)"', chart)
    numbers = [re.findall(r"-?[\d.]+", path) for path in found]
    return [np.array(values, float).reshape(-1, 2) for values in numbers]


def test_chart_maps_points_linearly():
    line = Line(label="a", x=np.array([0.0, 5.0, 10.0]), y=np.array([0.0, 1.0, 4.0]))
    chart = line_chart([line], y_label="y", references={"half": 2.0}, from_zero=True)
    (points,) = curves(chart, "curve line c0")
    x, y = points.T
    assert x[1] == pytest.approx((x[0] + x[2]) / 2, abs=0.01) and x[0] < x[2]
    assert y[0] > y[1] > y[2]
    assert (y[0] - y[1]) * 4 == pytest.approx(y[0] - y[2], abs=0.01)
    (reference,) = curves(chart, "reference")
    assert reference[:, 1] == pytest.approx((y[0] + y[2]) / 2, abs=0.01)
    assert "half 2" in chart and ">a</span>" in chart
    assert "var(--c0)" in chart and "#c0" not in chart  # the colours of the page


def test_labels_of_close_references_stand_apart():
    lines = [Line(label="", x=STEPS, y=10.0 / STEPS)]
    chart = line_chart(lines, y_label="y", references={"a": 1.0, "b": 1.1, "c": 1.2})
    heights = re.findall(r'class="reference"><text[^>]* y="([\d.]+)"', chart)
    assert len(heights) == 3 and np.diff([float(height) for height in heights]).max() < -8.0


def test_charts_of_odd_numbers():
    x = np.array([1.0, 2.0, 3.0])
    empty = line_chart([Line(label="a", x=x, y=np.full(3, np.nan))], y_label="loss")
    assert "nothing was recorded" in empty and "<svg" not in empty
    assert "nothing was recorded" in line_chart([], y_label="loss")
    gap = line_chart([Line(label="", x=x, y=np.array([1.0, np.nan, 2.0]))], y_label="loss")
    assert gap.count("<use ") == 2 and "L" not in re.findall(r'line c0"><path d="([^"]+)', gap)[0]
    assert "<use " in line_chart([Line(label="", x=x[:1], y=x[:1])], y_label="loss")
    logarithmic = line_chart(
        [Line(label="", x=x, y=np.array([0.0, 1e-3, 10.0]))], y_label="norm", is_log=True
    )
    assert "nan" not in logarithmic and ">0.01<" in logarithmic
    assert EVIL not in line_chart([Line(label=EVIL, x=x, y=x)], y_label=EVIL)
    faint, line = with_smoothed("s", x, x)
    assert (faint.kind, faint.label, line.kind, line.label) == ("faint", "", "line", "s")


def test_numbers_on_axes_are_short():
    spelled = [plain_number(x) for x in (0.0, 0.5, 20_000.0, 1e6, 2.5e-5, -3.0)]
    assert spelled == ["0", "0.5", "20,000", "1e6", "2.5e-5", "-3"]


# --- the load map ---


def decode(address: str) -> tuple[int, int, bytes]:
    """Width, height and pixels of a PNG of ours."""
    data = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    place, chunks = 8, {}
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        (check,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert check == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    assert len(chunks[b"PLTE"]) == 768 and len(chunks[b"tRNS"]) == 256
    rows = zlib.decompress(chunks[b"IDAT"])
    assert len(rows) == height * (width + 1)
    return (
        width,
        height,
        b"".join(rows[i * (width + 1) + 1 : (i + 1) * (width + 1)] for i in range(height)),
    )


def test_levels_and_colours_of_loads():
    ratio = np.array([[0.0, 0.5, 1.0], [2.0, 3.98, np.nan]])
    level = load_map.levels(ratio)
    assert level.tolist() == [[0, 32, 64], [128, 255, 0]]
    colors = load_map.palette()
    assert colors[64][3] == 0 and colors[0][3] == colors[255][3] == 255
    assert colors[32][2] > colors[32][0] and colors[128][0] > colors[128][2]  # blue, red
    alphas = [color[3] for color in colors]
    assert alphas[:65] == sorted(alphas[:65], reverse=True) and alphas[64:] == sorted(alphas[64:])
    assert decode(load_map.png(level)) == (3, 2, level.tobytes())


def test_the_map_holds_every_step_of_a_short_run():
    load = np.random.default_rng(0).dirichlet(np.ones(8), size=(5, 3))
    steps = np.array([1, 2, 3, 4, 9])
    page = load_map.load_map(steps, load)
    (text,) = re.findall(r'id="load-map-data">(.*?)</script>', page)
    data = json.loads(text)
    assert data["steps"] == [1, 2, 3, 4, 9] and (data["layers"], data["experts"]) == (3, 8)
    loads = np.frombuffer(base64.b64decode(data["loads"]), np.uint8).reshape(5, 3, 8)
    np.testing.assert_array_equal(loads, load_map.levels(load * 8))
    # Without the script: a picture of the last step, and words that say so.
    (picture,) = re.findall(r'<img [^>]*src="([^"]+)"', page)
    assert decode(picture) == (8, 3, loads[-1].tobytes())
    assert "At the last step, 9." in page and '<div class="slider" hidden>' in page


@pytest.mark.parametrize(
    ("steps", "layers", "experts"),
    [(1, 1, 1), (400, 48, 128), (2000, 4, 8), (60, 61, 256), (5, 100, 4096)],
)
def test_the_map_stays_small(steps, layers, experts):
    chosen = load_map.frames(steps, layers * experts)
    assert len(chosen) <= load_map.MAX_FRAMES and chosen[-1] == steps - 1
    assert len(chosen) == 1 or (
        chosen[0] == 0 and len(chosen) * layers * experts <= load_map.MAX_MAP_BYTES
    )
    if layers * experts > 50_000:
        return
    load = np.random.default_rng(0).random((steps, layers, experts), np.float32)
    load /= load.sum(-1, keepdims=True)
    size = len(load_map.load_map(np.arange(steps), load))
    assert size + len(load_map.load_strips(np.arange(steps), load)) < 1_500_000


def test_strips_are_one_picture_per_layer():
    load = np.full((600, 3, 8), 1 / 8)
    page = load_map.load_strips(np.arange(600), load)
    pictures = re.findall(r'<img [^>]*src="([^"]+)"', page)
    assert [decode(picture)[:2] for picture in pictures] == [(240, 8)] * 3
    assert set(decode(pictures[0])[2]) == {64}


# --- the page of a run ---


def series(scale=1.0, **more):
    made = {
        LOSS: (STEPS, scale * (1.5 + 4.0 * np.exp(-STEPS / 10))),
        LEARNING_RATE: (STEPS, np.linspace(1e-2, 0, 40)),
        GRADIENT_NORM: (STEPS, 0.1 + 1 / STEPS),
        ROUTER_ENTROPY: (STEPS, np.full(40, 0.9)),
        LOAD_ENTROPY: (STEPS, np.full(40, 0.95)),
        LOAD_BALANCE: (STEPS, np.full(40, 1.1)),
        MAX_VIOLATION: (STEPS, np.full(40, 0.5)),
        BITS_PER_BYTE: (STEPS[9::10], np.array([3.0, 2.5, 2.2, 2.0])),
        BITS_PER_TOKEN: (STEPS[9::10], np.array([6.0, 5.0, 4.4, 4.0])),
        TRAINED_TOKENS: (STEPS, STEPS * 100.0),
        TRAINED_SECONDS: (STEPS, STEPS * 0.5),
    }
    return made | more


SUMMARY = {
    "status": "done",
    "steps": 40,
    "tokens": 4000,
    "eval_bits_per_byte": 2.0,
    "eval_bits_per_token": 4.0,
    "bytes_per_token": 2.0,
    "final_loss": 1.57,
    "tokens_per_second": 12_449.0,
    "mfu": 0.4123,
    "model_flops_per_token": 6.12e6,
    "parameters_total": 2_692_480,
    "parameters_active": 923_008,
    "compile_seconds": 12.0,
    "wall_seconds": 100.0,
    "peak_memory_bytes": 1_630_000_000,
    "peak_memory_of": "process",
    "router_max_violation": 0.5,
    "router_dropped_fraction": 0.0,
    "references_bits": {"xz": 1.825, EVIL: 2.5},
    "load_balance_units": {"jaxmoe": 1.1, "megatron": 1.1, "megablocks": 1.1, "huggingface": 2.2},
}


def test_the_report_has_everything_and_nothing_of_it_is_fetched(tmp_path):
    load = np.random.default_rng(0).dirichlet(np.ones(8), size=(40, 2))
    write_report(
        tmp_path / "report.html",
        title=EVIL,
        summary=SUMMARY,
        metrics=series(),
        load=(STEPS, load),
        samples=EVIL,
        config={"data": {"path": EVIL}},
        environment={
            "command": f"python -m experiments.pretrain {EVIL}",
            "started": "2026-11-23T23:16:01+00:00",
            "host": "machine-7",
            "python": "3.11.7",
            "packages": {"jax": "0.10.2", "flax": None},
            "commit": "50d1d3f1f29f",
            "variables": {},
        },
    )
    page = (tmp_path / "report.html").read_text()
    assert check_page(page).scripts == 2  # the numbers of the map, and what draws them
    assert page.index('class="cards"') < page.index("<h2>Training") < page.index("<h2>Router")
    for words in (
        "2.0000",
        "12.4k",
        "MFU 41.2%",
        "2.69M",
        "923k active",
        "1:40",
        "1.63 GB",
        "xz 1.82",
        "learning rate",
        "gradient norm",
        "router entropy / log E",
        "load-balancing loss",
        "max violation",
        "Hugging Face counts tokens",
        "2.2000",
        "tokens/s times model FLOPs per token over the peak FLOP/s of all devices",
        "machine-7",
        "50d1d3f1f29f",
        "2026-11-23T23:16:01",
        "python 3.11.7, jax 0.10.2",
        "python -m experiments.pretrain",
        "Command and machine",
        "busiest expert",
    ):
        assert words in page, words
    # Training loss in the unit of the held-out loss: 1.5 nats of 2-byte tokens at the end.
    assert "bits/byte" in page and len(page) < 300_000


def test_what_was_learnt_is_said_in_words_and_one_unit(tmp_path):
    assert learnt({}) == ""
    references = {"xz": 1.8, "1-byte context counts": 3.5, "2-byte context counts": 2.6}
    text = learnt(SUMMARY | {"references_bits": references, "skipped_steps": 2})
    assert text == (
        "The model needs 2.00 bits for a byte of text that it has not read. That is better than"
        " 2-byte context counts (2.60). It has not reached xz (1.80). It knows the text of its"
        " training far better (1.13): more text, or fewer steps, would help. The busiest expert"
        " computes 1.5 times its fair share of the tokens. Steps that were refused and changed"
        " nothing: 2."
    )
    by_token = {"eval_bits_per_token": 4.0, "final_loss": 4.0 * math.log(2)}
    assert learnt(by_token) == "The model needs 4.00 bits for a token of text that it has not read."
    assert training_bits(by_token, "bits/token") == pytest.approx(4.0)
    write_report(tmp_path / "r.html", title="t", summary={"final_loss": 2 * math.log(2)})
    page = (tmp_path / "r.html").read_text()
    assert "training loss, bits/token" in page and ">2.0000<" in page and "nats/token" not in page


def test_a_page_has_charts_for_wide_screens_and_for_phones(tmp_path):
    write_report(tmp_path / "r.html", title="t", summary=SUMMARY, metrics=series())
    page = (tmp_path / "r.html").read_text()
    training = page[page.index("<h2>Training") :]
    wide, narrow = re.search(
        r'<div class="wide">(.*?)</div><div class="narrow">(.*?)</div>', training
    ).groups()
    assert 'viewBox="0 0 960 340"' in wide and 'viewBox="0 0 420 300"' in narrow
    assert wide.count("curve") == narrow.count("curve") > 0


def test_a_report_of_what_little_there_is(tmp_path):
    write_report(tmp_path / "r.html", title="t", summary={"status": "diverged", "steps": 3})
    page = (tmp_path / "r.html").read_text()
    assert check_page(page).scripts == 0 and "diverged at step 3" in page
    metrics = {LOSS: (STEPS, np.full(40, math.nan))}
    write_report(tmp_path / "r.html", title="t", summary={"mfu": None}, metrics=metrics)
    assert "nothing was recorded" in (tmp_path / "r.html").read_text()


# --- the comparison ---


def compared(name, scale=1.0, flops=10.0, bytes_per_token=2.0, without=()):
    made = {key: value for key, value in series(scale).items() if key not in without}
    load = np.full((2, 4), 0.25)
    return ComparedRun(
        name=name,
        summary=SUMMARY | {"model_flops_per_token": flops},
        series=made,
        load=load,
        flops_per_token=flops,
        bytes_per_token=bytes_per_token,
    )


def test_runs_are_compared_on_four_axes_with_and_without_scripts(tmp_path):
    runs = [
        compared("a"),
        compared(EVIL, 0.9, flops=20.0),
        compared("old", without=TRAINED_SECONDS),
    ]
    write_comparison(
        tmp_path / "c.html",
        title="a against b",
        runs=runs,
        differing={"model.moe.top_k": ["2", EVIL, "2"]},
        notes=["old is not finished"],
    )
    page = (tmp_path / "c.html").read_text()
    assert check_page(page).scripts == 3  # the numbers, the library, what draws with it
    assert "Copyright (c) 2022 Leon Sorokin" in page and "MIT License" in page
    text = re.search(r'<script id="series" type="application/json">(.*?)</script>', page)[1]
    data = json.loads(text)
    assert [run["name"] for run in data["runs"]] == ["a", EVIL, "old"]
    first, _, old = data["runs"]
    assert data["unit"] == "bits per byte" and old["x"][3] is None and old["x"][0] is not None
    assert first["x"][1][-1] == 4000 and first["held_y"] == [3.0, 2.5, 2.2, 2.0]
    assert first["y"][-1] == pytest.approx(1.57 / math.log(2) / 2, rel=0.02)
    table = re.search(r'<table class="sortable">.*?</table>', page)[0]
    assert table.count("<tr>") == 4 and '<td data-value="12449.0">12.4k</td>' in table
    assert "training loss, bits per byte" in table and "nats" not in page.partition("<script")[0]
    for axis in AXES:
        assert f"by {axis.name}" in page
    pictures = re.search(r"<noscript>.*?</noscript>", page)[0]
    assert pictures.count("<svg") == page.count("<svg") == page.count('type="radio"') == 4
    assert page.count(" checked>") == 1
    assert "Not known by time: old." in page and "old is not finished" in page
    assert "model.moe.top_k" in page and "bits per byte" in page


def test_equal_cost_is_that_of_the_cheapest():
    cheap, dear = compared("cheap", flops=10.0), compared("dear", flops=20.0)
    budget, losses = at_equal_cost([cheap, dear], "FLOPs")
    assert budget == 4000 * 10.0
    # The dear one had spent as much after half of its steps.
    _, nats = cheap.series[LOSS]
    assert losses[0] == pytest.approx(nats[-1] / math.log(2) / 2, rel=0.02)
    assert losses[1] == pytest.approx(nats[19] / math.log(2) / 2, rel=0.02)
    assert at_equal_cost([cheap, compared("x", without=TRAINED_SECONDS)], "time")[0] is None
    budget, losses = at_equal_cost([cheap, dear, compared("y", without=TRAINED_TOKENS)], "tokens")
    assert budget == 4000 and losses[2] is None


def test_runs_with_unknown_bytes_are_compared_by_token():
    runs = [compared("a"), compared("b", bytes_per_token=None)]
    assert bits_unit(runs) == ("bits per token", BITS_PER_TOKEN)
    assert bits_unit(runs[:1]) == ("bits per byte", BITS_PER_BYTE)
    rows = {number.label: tuple(number.cells) for number in final_numbers(runs)}
    assert rows["MFU"] == ("41.2%", "41.2%") and rows["held-out loss"][0] == "2.0000 bits/byte"
    assert "mesh" not in rows  # unknown in all runs


def test_losses_of_a_run_have_one_unit_whether_it_was_evaluated_or_not():
    series = {LOSS: (np.arange(1, 3), np.full(2, 8 * math.log(2.0)))}
    for evaluated, unit, bits in (
        ({}, "bits/byte", 2.0),
        ({"eval_bits_per_byte": 1.5, "eval_bits_per_token": 6.0}, "bits/byte", 2.0),
        ({"eval_bits_per_token": 6.0}, "bits/token", 8.0),
    ):
        summary = {"final_loss": 8 * math.log(2.0), "bytes_per_token": 4.0} | evaluated
        assert held_out(summary)[1] == unit
        np.testing.assert_allclose(bits_of_training(series, summary)[1], bits)
        assert training_bits(summary, unit) == pytest.approx(bits)
    assert held_out({"final_loss": 1.0})[1] == "bits/token"


def test_the_page_of_a_run_that_has_not_ended_knows_the_bytes_of_its_tokens(tmp_path, monkeypatch):
    summaries = []
    monkeypatch.setattr("jaxmoe.run.reporting.report.plot_run", lambda *args, **kwargs: None)
    monkeypatch.setattr(
        "jaxmoe.run.reporting.report.write_run_report",
        lambda directory, name, summary, *args: summaries.append(summary),
    )
    steps = np.array([1])
    series = {BITS_PER_TOKEN: (steps, np.array([8.0])), BITS_PER_BYTE: (steps, np.array([2.0]))}
    run = RecordedRun(
        directory=RunDirectory(tmp_path), config={}, summary={"steps": 1}, series=series, notes=()
    )
    rebuild_report(run)
    assert summaries[0]["bytes_per_token"] == 4.0
