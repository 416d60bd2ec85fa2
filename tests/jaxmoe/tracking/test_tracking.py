# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trackers and the router's load; and what a full disk does to them."""

import errno
import io
import json
import logging
import math
import os
import struct
import sys

import numpy as np
import pytest

from jaxmoe import json_bounds
from jaxmoe.disk import replace_file
from jaxmoe.tracking import (
    BITS_PER_BYTE,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOSS,
    MAX_VIOLATION,
    TOKENS_PER_SECOND,
    CompositeTracker,
    ConsoleTracker,
    JsonlTracker,
    MissingPackageError,
    NullTracker,
    RouterLoadRecorder,
    TensorBoardTracker,
    history,
    jsonl,
    read_metrics,
    read_router_load,
)
from jaxmoe.tracking.console import format_bytes, format_count, format_duration
from jaxmoe.tracking.history import load_metrics
from jaxmoe.tracking.jsonl import read_last_metrics
from jaxmoe.tracking.load_map import load_image


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Recording(NullTracker):
    def __init__(self):
        self.calls = []

    def log(self, step, metrics):
        self.calls.append(("log", step, dict(metrics)))

    def log_text(self, step, name, text):
        self.calls.append(("text", step, name, text))

    def log_histograms(self, step, histograms):
        self.calls.append(("histograms", step, list(histograms)))

    def log_image(self, step, name, pixels, caption):
        self.calls.append(("image", step, name, caption))

    def close(self):
        self.calls.append(("close",))


def test_composite_passes_everything_on():
    trackers = [Recording(), Recording()]
    composite = CompositeTracker(*trackers, NullTracker())
    composite.log(1, {LOSS: 2.0})
    composite.log_text(2, "sample", "abc")
    composite.log_histograms(3, {"load": (np.ones(2), np.arange(3))})
    composite.log_image(4, "map", np.zeros((1, 1, 3), np.uint8), "caption")
    composite.close()
    expected = [("log", 1, {LOSS: 2.0}), ("text", 2, "sample", "abc")]
    expected += [("histograms", 3, ["load"]), ("image", 4, "map", "caption"), ("close",)]
    assert [tracker.calls for tracker in trackers] == [expected, expected]


# --- metrics.jsonl ---


def test_jsonl_lines_are_on_disk_at_once(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {LOSS: np.float32(2.5), "bad": math.nan, "worse": math.inf})
    tracker.log_text(1, "sample", 'a "b"\n')
    lines = path.read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 1, LOSS: 2.5, "bad": None, "worse": None},
        {"step": 1, "text": {"sample": 'a "b"\n'}},
    ]
    tracker.close()


# Killed in the middle of a line, and just before its end.
@pytest.mark.parametrize("cut", ['{"step": 6, "train/lo', '{"step": 6, "train/loss": 1.0}'])
@pytest.mark.parametrize("resume_step", [0, 3, 5, 9])
def test_jsonl_resumes_at_the_restored_step(tmp_path, resume_step, cut):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in range(1, 6):
        tracker.log(step, {LOSS: 1.0 / step})
        tracker.log_text(step, "sample", "x")
    tracker.close()
    with path.open("a") as file:
        file.write(cut)
    tracker = JsonlTracker(path, resume_step)
    tracker.log(resume_step + 1, {LOSS: 7.0})
    tracker.close()
    steps, values = read_metrics(path)[LOSS]
    kept = min(resume_step, 5)
    assert steps.tolist() == [*range(1, kept + 1), resume_step + 1]
    assert values.tolist() == [*(1.0 / step for step in range(1, kept + 1)), 7.0]
    assert len(path.read_text().splitlines()) == 2 * kept + 1


def _long_run(path, steps):
    """Write a run with evaluations, texts and a number in each tenth line."""
    tracker = JsonlTracker(path)
    for step in range(1, steps + 1):
        values = {LOSS: 1.0 / step, "train/grad_norm": float(step)}
        tracker.log(step, values | ({"perf/speed": 2.0 * step} if step % 10 == 0 else {}))
        if step % 100 == 0:
            tracker.log(step, {"eval/loss": 3.0 / step})
            tracker.log_text(step, "sample", "x")
    tracker.close()


def test_curves_have_every_loss_and_evaluation_and_a_sample_of_the_rest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _long_run(path, 3000)
    whole, curves = read_metrics(path), read_metrics(path, max_lines=100)
    for name in (LOSS, "eval/loss"):
        np.testing.assert_array_equal(curves[name], whole[name])
    steps, norms = curves["train/grad_norm"]
    np.testing.assert_array_equal(steps, norms)
    assert 60 <= len(steps) <= 150
    assert np.ptp(np.diff(steps)) == 0  # evenly spread
    steps, speeds = curves["perf/speed"]
    assert len(steps) >= 5 and (speeds == 2.0 * steps).all()
    everything = read_metrics(path, max_lines=10_000)
    assert all(np.array_equal(everything[name], whole[name]) for name in whole)


def test_the_last_numbers_are_those_of_the_whole_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    _long_run(path, 990)
    monkeypatch.setattr(jsonl, "_LAST_LINES", 20)
    whole = {name: values[-1] for name, (_, values) in read_metrics(path).items()}
    assert read_last_metrics(path) == whole
    assert whole["eval/loss"] == 3.0 / 900


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_a_resumed_run_is_found_from_the_end_of_the_file(tmp_path, monkeypatch, block):
    path = tmp_path / "metrics.jsonl"
    _long_run(path, 120)
    monkeypatch.setattr(json_bounds, "_BLOCK_BYTES", block)
    forwards = list(json_bounds.read_byte_lines(path))
    assert list(json_bounds.read_byte_lines_backwards(path)) == forwards[::-1]
    with path.open("ab") as file:
        file.write(b'{"step": 130, "tr')
    assert list(json_bounds.read_byte_lines_backwards(path)) == forwards[::-1]
    for step in (1, 99, 100, 119, 500):
        wanted = max(end for end, line in forwards if json.loads(line)["step"] <= step)
        assert jsonl._end_of(path, step) == wanted
    assert jsonl._end_of(path, 0) == 0


def test_jsonl_values_are_read_back_bitwise(tmp_path):
    values = np.random.default_rng(0).normal(size=50)
    tracker = JsonlTracker(tmp_path / "m")
    for step, value in enumerate(values):
        tracker.log(step, {LOSS: value})
    tracker.close()
    np.testing.assert_array_equal(read_metrics(tmp_path / "m")[LOSS][1], values)


def test_jsonl_on_a_full_disk_warns_once_and_leaves_no_half_line(tmp_path, monkeypatch, caplog):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {LOSS: 1.0})
    write = os.write

    def write_five_bytes(file, data):
        return write(file, data[:5]) if data.startswith(b"{") else full_disk()

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", write_five_bytes)
        tracker.log(2, {LOSS: 2.0})
        tracker.log(3, {LOSS: 3.0})
    tracker.log(4, {LOSS: 4.0})
    tracker.close()
    assert read_metrics(path)[LOSS][0].tolist() == [1, 4]
    assert len(path.read_text().splitlines()) == 2
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path} cannot be written (No space left on device): the run goes on, this record has gaps"
    )


# --- TensorBoard ---


def events(directory):
    from tensorboardX.proto import event_pb2 as pb

    for file in sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime_ns):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield pb.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_tensorboard_events_are_written_at_once_and_purged_on_resume(tmp_path):
    tracker = TensorBoardTracker(tmp_path / "tb")
    tracker.log(3, {LOSS: 2.5, GRADIENT_NORM: 0.5})
    tracker.log_text(3, "sample", "a\nb")
    _, start, numbers, text = events(tmp_path / "tb")  # before close
    assert (start.step, start.session_log.status) == (1, 1)
    assert numbers.step == text.step == 3
    assert {v.tag: v.simple_value for v in numbers.summary.value} == {LOSS: 2.5, GRADIENT_NORM: 0.5}
    assert text.summary.value[0].tensor.string_val[0] == b"    a\n    b"
    tracker.close()
    tracker = TensorBoardTracker(tmp_path / "tb", resume_step=2)
    tracker.close()
    starts = [e.step for e in events(tmp_path / "tb") if e.HasField("session_log")]
    assert sorted(starts) == [1, 3]


def test_tensorboard_writes_nan_without_warnings(tmp_path, caplog):
    tracker = TensorBoardTracker(tmp_path / "tb")
    tracker.log(1, {LOSS: math.nan, GRADIENT_NORM: math.inf})
    tracker.close()
    *_, numbers = events(tmp_path / "tb")
    found = {value.tag: value.simple_value for value in numbers.summary.value}
    assert math.isnan(found[LOSS]) and found[GRADIENT_NORM] == math.inf
    assert not caplog.records


def test_tensorboard_has_histograms_and_images(tmp_path):
    tracker = TensorBoardTracker(tmp_path / "tb")
    load = np.array([[0.5, 0.25, 0.25, 0.0]])
    edges = np.linspace(0.0, 2.0, 5)
    tracker.log_histograms(7, {"router/layer_00/load": np.histogram(load * 4, bins=edges)})
    tracker.log_image(7, "router/load_map", load_image(np.array([7]), load[None]), "white is fair")
    _, _, distribution, picture = events(tmp_path / "tb")
    (value,) = distribution.summary.value
    assert (distribution.step, value.tag, value.histo.num) == (7, "router/layer_00/load", 4)
    assert list(value.histo.bucket) == [1, 0, 2, 1] and list(value.histo.bucket_limit)[-1] == 2.0
    (value,) = picture.summary.value
    assert value.tag == "router/load_map" and value.metadata.summary_description == "white is fair"
    assert (value.image.height, value.image.width) == (64, 480)
    assert value.image.encoded_image_string.startswith(b"\x89PNG")
    tracker.close()


def test_tensorboard_on_a_full_disk_does_not_hang(tmp_path, monkeypatch, caplog):
    tracker = TensorBoardTracker(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    for step in range(50):
        tracker.log(step, {LOSS: 1.0})
    monkeypatch.undo()
    tracker.close()
    assert len(caplog.records) == 1


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboardX"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingPackageError) as error:
        TensorBoardTracker(tmp_path)
    assert str(error.value) == "tensorboardX is not installed: pip install 'jaxmoe[train]'"


# --- the progress line ---


def test_the_progress_line():
    stream, times = io.StringIO(), iter([100.0, 110.0, 120.0, 130.0])
    tracker = ConsoleTracker(300, stream, clock=lambda: next(times))
    numbers = {
        TOKENS_PER_SECOND: 12_449.0,
        LOSS: 3.21406,
        LEARNING_RATE: 8.1e-3,
        GRADIENT_NORM: 0.41234,
        MAX_VIOLATION: 0.314,
        "train/other": 1.0,
    }
    tracker.log(100, numbers)
    tracker.log(200, {**numbers, BITS_PER_BYTE: 1.8231})
    tracker.log(250, {LOSS: 3.0})
    tracker.log(300, {LOSS: 2.0})
    rest = "lr=8.10e-03 grad_norm=0.412 tokens/s=12.4k max_violation=0.31"
    assert stream.getvalue().splitlines() == [
        f"step=100/300 loss=3.2141 {rest}",
        f"step=200/300 loss=3.2141 bpb=1.8231 {rest} eta=0:10",
        "step=250/300 loss=3.0000 bpb=1.8231 eta=0:07",
        "step=300/300 loss=2.0000 bpb=1.8231",
    ]


def test_the_progress_line_can_be_read_by_a_program():
    stream = io.StringIO()
    tracker = ConsoleTracker(1000, stream)
    tracker.log(7, {LOSS: 1.0})
    assert dict(pair.split("=") for pair in stream.getvalue().split()) == {
        "step": "7/1000",
        "loss": "1.0000",
    }
    tracker.log_text(7, "held out", "bits=1.5")  # one line for what has one
    tracker.log_text(8, "sample", "a\nb")
    assert stream.getvalue().splitlines()[1:] == [
        "held out at step 7: bits=1.5",
        "sample at step 8:",
        "a",
        "b",
    ]


def test_counts_and_durations():
    spelled = [format_count(x) for x in (0.5, 987.0, 999.9, 12_449.0, 3.912e6, 1.07e9)]
    assert spelled == ["0.5", "987", "1k", "12.4k", "3.91M", "1.07B"]
    assert [format_bytes(x) for x in (12, 5e6, 1.63e9)] == ["12 B", "5 MB", "1.63 GB"]
    assert [format_duration(x) for x in (0.4, 59.6, 61, 3600, 86_399)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:00:00",
        "23:59:59",
    ]


# --- router.npz ---


def test_router_load_is_a_share_and_resumes(tmp_path):
    path = tmp_path / "router.npz"
    recorder = RouterLoadRecorder(path)
    recorder.save()
    assert not path.exists()  # nothing to say yet
    counts = np.array([[3, 1, 0, 4], [2, 2, 2, 2], [0, 0, 0, 0]])
    for step in (10, 20, 30):
        recorder.record(step, counts * step)
    recorder.save()
    steps, load = read_router_load(path)
    assert steps.tolist() == [10, 20, 30]
    assert load.shape == (3, 3, 4) and load.dtype == np.float32
    expected = np.array([[0.375, 0.125, 0.0, 0.5], [0.25] * 4, [0.0] * 4], np.float32)
    for value in load:
        np.testing.assert_array_equal(value, expected)
    recorder = RouterLoadRecorder(path, resume_step=20)
    recorder.record(21, counts)
    recorder.save()
    assert read_router_load(path)[0].tolist() == [10, 20, 21]
    recorder = RouterLoadRecorder(path)  # a new run
    recorder.record(1, counts)
    recorder.save()
    assert read_router_load(path)[0].tolist() == [1]


def test_loads_are_scalars_up_to_a_count_and_histograms_beyond():
    load = np.array([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]])
    scalars, histograms = load_metrics(load)
    assert not histograms
    experts = [scalars[f"router/layer_00/load_expert_{e:02}"] for e in range(4)]
    assert experts == [2.0, 1.0, 1.0, 0.0]  # 1 is fair
    assert scalars["router/layer_00/max_violation"] == 1.0
    assert scalars["router/layer_00/min_violation"] == 1.0
    assert scalars["router/layer_00/load_entropy"] == pytest.approx(0.75)
    assert scalars["router/layer_01/load_entropy"] == pytest.approx(1.0)
    wide = np.full((2, 129), 1 / 129)
    scalars, histograms = load_metrics(wide)
    assert len(scalars) == 6 and list(histograms) == [f"router/layer_{n:02}/load" for n in (0, 1)]
    assert histograms["router/layer_01/load"][0].sum() == 129


def test_the_load_picture_has_a_row_for_every_expert_and_a_column_for_every_step():
    load = np.full((3, 2, 4), 0.25)
    load[1, 1] = [1.0, 0.0, 0.0, 0.0]  # the second step, in the second layer
    picture = load_image(np.array([10, 20, 30]), load)
    assert picture.shape == (2 * 4 * 16 + 2, 480, 3)
    assert (picture[:64] == 255).all() and (picture[64:66] == 128).all()
    red, blue = picture[66 + 8, 240].astype(int), picture[66 + 24, 240].astype(int)
    assert red[0] > red[2] + 100 and blue[2] > blue[0] + 100
    assert (picture[66:, :160] == 255).all() and (picture[66:, 320:] == 255).all()
    wide = load_image(np.arange(2), np.full((2, 60, 256), 1 / 256))
    assert wide.shape[0] <= 512 + 2 * 60  # some experts share a row


def test_histograms_in_jsonl_are_no_metrics(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log_histograms(20, {"load": np.histogram([0.5, 1.5], bins=2, range=(0.0, 2.0))})
    tracker.log_image(20, "map", np.zeros((1, 1, 3), np.uint8), "caption")
    tracker.log(20, {LOSS: 1.0})
    tracker.close()
    first = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])
    expected = {"load": {"counts": [1, 1], "edges": [0.0, 1.0, 2.0]}}
    assert first == {"step": 20, "histogram": expected}
    assert list(read_metrics(tmp_path / "m.jsonl")) == [LOSS]


def test_router_load_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MAX_RECORDS", 8)
    recorder = RouterLoadRecorder(tmp_path / "r.npz")
    for step in range(1, 101):
        recorder.record(step, np.full((1, 2), step))
    recorder.save()
    steps, load = read_router_load(tmp_path / "r.npz")
    assert len(steps) == len(load) <= 8
    assert steps[0] == 1 and steps[-1] >= 99 and np.all(np.diff(steps) > 0)


def test_router_load_survives_a_full_disk_and_a_damaged_file(tmp_path, monkeypatch, caplog):
    path = tmp_path / "router.npz"
    recorder = RouterLoadRecorder(path)
    recorder.record(1, np.ones((1, 2)))
    recorder.save()
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        recorder.record(2, np.ones((1, 2)))
        recorder.save()
        recorder.save()
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["router.npz"]
    assert len(caplog.records) == 1
    path.write_bytes(before[: len(before) // 2])
    recorder = RouterLoadRecorder(path, resume_step=1)
    assert "begins anew" in caplog.records[-1].getMessage()
    recorder.record(2, np.ones((1, 2)))
    recorder.save()
    assert read_router_load(path)[0].tolist() == [2]


def test_replace_file_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file"
    replace_file(path, "old")
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_text() == "old" and len(list(path.parent.iterdir())) == 1
