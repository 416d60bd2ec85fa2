# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.outer`: its numbers, its table and picture, and what it refuses."""

import dataclasses
import json
import math

import pytest

from experiments.studies.outer import command as outer
from experiments.studies.outer.config import FITTED, METHODS, OuterConfig, replicas_of, run_of
from experiments.studies.outer.table import LEGEND, TABLE, as_bytes, rows_of
from experiments.studies.study import StudyStoppedError
from jaxmoe.run.plan import make_plan
from jaxmoe.training.replicas import REPLICAS

TINY = (
    "--model.num_layers",
    "1",
    "--model.embed_dim",
    "8",
    "--model.attention.num_heads",
    "1",
    "--model.attention.num_kv_heads",
    "1",
    "--model.attention.head_dim",
    "8",
    "--model.moe.num_experts",
    "2",
    "--model.moe.expert_dim",
    "8",
    "--evaluation_batches",
    "2",
    "--training.steps",
    "4",
    "--training.batch_size",
    "4",
    "--training.sequence_length",
    "8",
    "--schedule.warmup_steps",
    "1",
    "--workers",
    "2",
    "--every",
    "2",
    "--seeds",
    "1",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a comparison, and its summary."""
    directory = tmp_path_factory.mktemp("outer") / "run"
    flags = ("--methods", "diloco", "--run.directory", str(directory))
    assert outer.main([*TINY, *flags]) == 0
    return directory, json.loads((directory / "summary.json").read_text())


def test_table_bytes_and_picture(finished):
    directory, summary = finished
    assert (summary["status"], summary["methods"]) == ("done", ["none", "diloco"])
    assert (summary["steps"], summary["tokens"], summary["workers"]) == (4, 4 * 4 * 8, 2)
    rows = {row["method"]: row for row in summary["rows"]}
    none, diloco = rows["none"], rows["diloco"]
    floor = OuterConfig().data.build().entropy_bits_per_token(8)
    assert summary["entropy_floor"] == pytest.approx(floor)
    for row in rows.values():
        assert row["status"] == "done" and 0.0 < row["excess"] < 9.0
        assert (row["tokens"], row["skipped"]) == (128, 0)
    assert none["difference"] is None and none["spread"] is None
    assert diloco["difference"] == pytest.approx(diloco["excess"] - none["excess"])
    assert diloco["half_width"] is None and diloco["spread"] > 0.0
    # Two workers: an all-reduce sends every number of four bytes once, every second step.
    record = json.loads((directory / "config.json").read_text())
    assert record["every"] == 2
    numbers = make_plan(run_of(_config(), "none")).table.total
    assert none["bytes"] == 4 * numbers and diloco["bytes"] == 2 * numbers
    assert (none["saving"], diloco["saving"]) == (1.0, 2.0)
    assert diloco["replicas"]["workers"] == diloco["replicas"]["every"] == 2
    assert (directory / "plots" / "outer.png").read_bytes().startswith(b"\x89PNG")
    assert "| diloco |" in summary["markdown"]


def _config():
    """The config of TINY as far as the parameters go."""
    config = OuterConfig()
    attention = dataclasses.replace(config.model.attention, num_heads=1, num_kv_heads=1, head_dim=8)
    assert config.model.moe is not None
    moe = dataclasses.replace(config.model.moe, num_experts=2, expert_dim=8)
    model = dataclasses.replace(
        config.model, num_layers=1, embed_dim=8, attention=attention, moe=moe
    )
    return dataclasses.replace(config, model=model)


def test_the_same_command_adds_methods(finished, monkeypatch):
    directory, summary = finished
    trained = []

    def trial(config, name, task, stop):
        trained.append(name)
        return {"method": name, "status": "failed", "reason": "not today", "seconds": 1.0}

    monkeypatch.setattr(outer, "run_trial", trial)
    monkeypatch.setattr(outer.OuterStudy, "_task", None)
    flags = ("--methods", "diloco", "alone", "--run.directory", str(directory))
    assert outer.main([*TINY, *flags]) == 0
    more = json.loads((directory / "summary.json").read_text())
    assert trained == ["alone"]
    rows = {row["method"]: row for row in more["rows"]}
    assert rows.pop("alone")["reason"] == "not today"
    assert list(rows.values()) == summary["rows"]


@pytest.mark.slow
def test_a_worker_alone_and_workers_on_devices_of_their_own(finished, tmp_path):
    before = {row["method"]: row for row in finished[1]["rows"]}
    flags = ("--methods", "diloco", "alone", "--replica", "2")
    assert outer.main([*TINY, *flags, "--run.directory", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = {row["method"]: row for row in summary["rows"]}
    assert (rows["alone"]["tokens"], rows["alone"]["bytes"]) == (64, 0.0)
    for name in ("none", "diloco"):
        assert rows[name]["excess"] == pytest.approx(before[name]["excess"], abs=1e-4)
        assert rows[name]["bytes"] == before[name]["bytes"]


def test_a_signal_leaves_a_summary(monkeypatch, tmp_path):
    def stopped(config, name, task, stop):
        stop.reason = "preempted"
        raise StudyStoppedError

    monkeypatch.setattr(outer, "run_trial", stopped)
    monkeypatch.setattr(outer.OuterStudy, "_task", None)
    assert outer.main([*TINY, "--run.directory", str(tmp_path / "run")]) == 75
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rows"]) == ("preempted", [])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--methods", "dilocco"),
            "methods: there is no method 'dilocco': did you mean 'diloco'? methods: none, alone,",
        ),
        (("--every", "3"), "every=3 must divide training.steps=4, so that the last step ends"),
        (("--workers", "1"), "workers=1 must be at least 2"),
        (("--workers", "3"), "training.batch_size=4 must be divisible by the 3 workers times"),
        (("--replica", "3"), "replica=3 must be workers=2, or 1 for one device"),
        (("--seeds", "0"), "seeds=0 must lie between 1 and 10"),
        (("--data.vocab_size", "9"), "model.vocab_size=8 is smaller than the vocabulary of"),
        (
            ("--workers", "64", "--replica", "64", "--training.batch_size", "4096"),
            "replica=64 needs as many devices, there are 8: give --replica 1",
        ),
    ],
)
def test_bad_input_is_one_line(flags, text, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        outer.main([*TINY, *flags, "--run.directory", str(tmp_path / "run")])
    assert stopped.value.code == 2
    printed = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert text in printed
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_fitted_to_the_study(name):
    config = OuterConfig()
    chosen = replicas_of(config, name)
    assert chosen.name == ("none" if name == "alone" else name)
    fields = {field.name for field in dataclasses.fields(chosen)}
    for field in fields & {"workers", "every"}:
        assert getattr(chosen, field) == getattr(config, field)
    training = make_plan(run_of(config, name)).config.training
    assert training.batch_size == (8 if name == "alone" else 32)


def test_the_methods_are_those_of_the_registry():
    assert {*METHODS} == {*REPLICAS, "alone"} and METHODS[0] == "none"
    config = OuterConfig(methods=("alone",))
    assert config.chosen == ("none", "alone")


@pytest.mark.parametrize(("layers", "default", "number"), [(2, 4, 2), (6, 4, 3), (5, 4, 1)])
def test_fragments_divide_the_layers(layers, default, number):
    model = dataclasses.replace(OuterConfig().model, num_layers=layers)
    assert FITTED["fragments"](OuterConfig(model=model), default) == number


def record(method, bits, **fields):
    numbers = {"bits": bits, "bytes": 1000.0, "spread": [None] * len(bits), "skipped": [0]}
    return {"method": method, "status": "done", "tokens": 10_000, "seconds": 1.0} | numbers | fields


def test_rows_are_paired_with_the_baseline_and_sorted():
    records = [
        record("none", [1.5, 1.7]),
        record("a", [1.4, 1.8], bytes=10.0, spread=[0.5, 1.5], skipped=[1, 2]),
        record("b", [1.3, 1.5]),
        record("c", [1.3, None], status="diverged", reason="seed 1: 9 steps not finite"),
        {"method": "d", "status": "refused", "reason": "no " * 60},
    ]
    rows = rows_of(records, floor=1.0)
    assert [row["method"] for row in rows] == ["b", "none", "a", "c", "d"]
    b, none, a, c, _ = rows
    assert a["excess"] == pytest.approx(0.6) and none["difference"] is None
    assert (a["difference"], a["saving"]) == (pytest.approx(0.0), 100.0)
    assert a["half_width"] == pytest.approx(12.706 * 0.1, rel=1e-4)
    assert b["difference"] == pytest.approx(-0.2) and b["half_width"] == pytest.approx(
        0.0, abs=1e-9
    )
    assert (a["spread"], a["skipped"], c["excess"]) == (1.0, 3, None)
    text = TABLE.as_text(rows)
    assert max(map(len, (text + "\n" + LEGEND).splitlines())) <= 120
    assert "diverged: seed 1: 9 steps not finite" in text and "refused: no no" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 B"), (999.0, "999 B"), (999.6, "1 kB"), (70_016.0, "70 kB"), (3e9, "3 GB")],
)
def test_bytes_have_three_digits(value, text):
    assert as_bytes(value) == text and not math.isnan(value)
