# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Damaged files of a run: an error that names the file, and nothing waits."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import pytest

from experiments import recipes
from jaxmoe.configs import to_json
from jaxmoe.contrib.elastic.request import read_resizes
from jaxmoe.json_bounds import MAX_JSON_BYTES
from jaxmoe.resilience.goodput import StartRecord, read_ledger
from jaxmoe.resilience.lease import Lease
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.prepare import check_trains
from jaxmoe.run.provenance.lineage import Event, read_lineage
from jaxmoe.run.restore import read_skipped
from jaxmoe.tracking.jsonl import read_metrics

TEXTS = {
    "null": (b"null", "holds null"),
    "number": (b"7", "holds a number"),
    "text": (b'"a"', "holds a text"),
    "cut": (b'{"a', "is not JSON"),
    "empty": (b"", "is not JSON"),
    "bytes": (b"\xff\xfe{}", "not in UTF-8"),
    "deep list": (b"[" * 100_000, "nested deeper than 64"),
    "deep object": (b'{"a":' * 100_000, "nested deeper than 64"),
    "endless number": (b"[" + b"7" * 5000 + b"]", ""),
    "large": (None, "bytes, at most"),
}
PLACES = {"fifo": "a FIFO", "directory": "a directory"}
READERS = {
    "config.json": lambda directory: directory.load_config(PretrainConfig),
    "summary.json": RunDirectory.summary,
    "lineage.json": read_lineage,
    "skipped.json": read_skipped,
}
LINES = {
    "goodput.jsonl": lambda directory: read_ledger(directory.goodput_file),
    "metrics.jsonl": lambda directory: read_metrics(directory.metrics_file),
}
LEASE = ("run.lock", "run.lease", "run.heartbeat")


@pytest.fixture(autouse=True)
def impatient():
    """A test that waits for a FIFO fails."""

    def stuck(*_):
        pytest.fail("waits")

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(tmp_path / "run")
    with made.held():
        made.check_config(recipes.markov(steps=9))
    return made


def put(path, kind):
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(MAX_JSON_BYTES + 1)  # of no blocks
    else:
        path.write_bytes(TEXTS[kind][0])


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", [*TEXTS, *PLACES])
def test_json_that_cannot_be_used_is_named(directory, name, kind):
    path = directory.path / name
    put(path, kind)
    said = PLACES[kind] if kind in PLACES else TEXTS[kind][1]
    with pytest.raises(ValueError) as refused:
        READERS[name](directory)
    assert str(path) in str(refused.value) and said in str(refused.value)


@pytest.mark.parametrize("kind", [*TEXTS, *PLACES])
def test_an_environment_that_cannot_be_read_is_none(directory, kind):
    put(directory.environment_file, kind)
    assert directory.environment() is None and read_resizes(directory) == []


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("kind", [*TEXTS, *PLACES])
def test_lines_that_hold_no_record_are_passed_over(directory, name, kind):
    path = directory.path / name
    put(path, kind)
    if kind in PLACES:
        with pytest.raises(ValueError, match=f"{name} cannot be used \\(it is {PLACES[kind]}"):
            LINES[name](directory)
    else:
        assert not LINES[name](directory)


@pytest.mark.parametrize("kind", PLACES)
def test_a_start_refuses_what_is_no_file_before_it_writes(directory, kind):
    plain = [path.name for path in directory._files()]
    for name in (*plain, *LEASE):
        place = directory.path / name
        before = place.read_bytes() if place.exists() else None
        put(place, kind)
        with pytest.raises(ValueError, match=f"{name} is {PLACES[kind]}.*, and must be a plain"):
            directory.acquire()
        place.rmdir() if kind == "directory" else place.unlink()
        if before is not None:
            place.write_bytes(before)
    with directory.held():
        pass


@pytest.mark.parametrize("kind", TEXTS)
def test_a_damaged_lease_without_a_holder_is_taken(directory, kind):
    for name in LEASE:
        put(directory.path / name, kind)
    with directory.held():
        directory.fence()
        assert json.loads((directory.path / "run.lease").read_text())["incarnation"] == 1


def test_a_lease_with_values_of_other_types_is_taken(directory):
    lease = directory.path / "run.lease"
    whole = json.loads(lease.read_text())
    for name in whole:
        for value in (None, [], {}, "x", -1, 1e300):
            if type(value) is type(whole[name]) and name != "heartbeat":
                continue
            lease.write_text(json.dumps({**whole, name: value}))
            holder = Lease(directory.path, heartbeat=0.01)
            holder.acquire()
            holder.release()


def test_records_with_values_of_other_types_are_passed_over_or_named(directory):
    event = dataclasses.asdict(Event(event="extended", step=3))
    record = dataclasses.asdict(
        StartRecord(start=1, began=2.0, first_step=0, step=3, status="done", seconds={"train": 1.0})
    )
    for value in (None, [None], {"a": None}, 1e300):
        for name in event.keys() - {"source", "changes"} | {"changes"}:
            directory.lineage_file.write_text(json.dumps([{**event, name: value}]))
            with pytest.raises(ValueError, match=r"lineage.json is damaged"):
                read_lineage(directory)
        for name in record.keys() - {"began"}:
            directory.goodput_file.write_text(json.dumps({**record, name: value}) + "\n")
            assert read_ledger(directory.goodput_file) == []
    lines = [{"step": None, "a": 1}, {"step": "x"}, {"step": 1, "a": {"b": 1}, "c": 2.0, "d": "x"}]
    directory.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(read_metrics(directory.metrics_file)) == ["c"]


def test_a_config_with_values_of_other_types_is_named(directory):
    whole = to_json(recipes.markov(steps=9))
    for name in whole:
        for value in (None, 7, [], "x", {"a": None}):
            if whole[name] == value:
                continue
            directory.config_file.write_text(json.dumps({**whole, name: value}))
            with pytest.raises(ValueError) as refused:
                check_trains(directory, recipes.markov(steps=9))
                directory.load_config(PretrainConfig)
            assert str(directory.config_file) in str(refused.value)


@pytest.mark.parametrize(
    "windows", [[[]], [7], [[1]], [[1, None]], [[1, 10**20]], [[-1, 2]], [[2, 1], [1, 1]]]
)
def test_skipped_rows_that_are_none_are_named(directory, windows):
    directory.skipped_file.write_text(json.dumps(windows))
    with pytest.raises(ValueError, match=r"skipped\.json cannot be used \(skipped=.*: restore or"):
        read_skipped(directory)


def test_an_integer_that_no_float_holds_is_named(directory):
    whole = json.loads(directory.config_file.read_text())
    whole["model"]["norm_epsilon"] = 10**400
    directory.config_file.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=r"config\.json: model.norm_epsilon has 401 digits"):
        directory.load_config(PretrainConfig)
