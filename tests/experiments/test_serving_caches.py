# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`serving caches`: the table, picture and summary of a trace."""

from __future__ import annotations

import json
import shutil

import pytest

from experiments.serving.__main__ import main
from jaxmoe.contrib.serving_lab.caches import ITEM_CACHES
from jaxmoe.routing.telemetry.trace import save_trace
from tests.support.traces import planted


def test_every_policy_is_replayed_on_a_trace_beside_the_bound(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_trace("trace.npz", planted(0, num_layers=2, num_experts=8, num_tokens=128))
    words = ["--trace", "trace.npz", "--expert_parameters", "1000000", "--capacity", "0.25", "0.5"]
    assert main(["caches", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.count("divided between host and device") == 2
    assert len([line for line in printed.splitlines() if line.split()[:1] == ["belady"]]) == 2
    summary = json.loads((tmp_path / "runs/serving/caches/summary.json").read_text())
    rows = summary["rows"]
    assert [row["policy"] for row in rows] == 2 * [*ITEM_CACHES]
    for row in rows:
        bound = next(r for r in rows if (r["policy"], r["capacity"]) == ("belady", row["capacity"]))
        assert row["over_bound"] == row["loads"] / bound["loads"] >= 1
        assert 0 <= row["hit_rate"] <= 1
    for split in summary["splits"]:
        assert split["seconds"] <= min(split["accelerator_alone"], split["host_alone"])
    assert (tmp_path / "runs/serving/plots/caches.png").stat().st_size > 1000


@pytest.mark.parametrize("words", [["quota", "0.25"], ["terms", "0:quota=0.05", "1:lifetime=2"]])
def test_the_flags_of_categories_reach_their_policy(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_trace("trace.npz", planted(0, num_layers=2, num_experts=8, num_tokens=128))
    given = ["--trace", "trace.npz", "--expert_parameters", "1000", "--capacity", "0.5"]
    assert main(["caches", *given, f"--category.{words[0]}", *words[1:]]) == 0
    rows = json.loads((tmp_path / "runs/serving/caches/summary.json").read_text())["rows"]
    hits = {row["policy"]: row["hit_rate"] for row in rows}
    assert hits["category"] > 2 * hits["lru"]  # which the other layer drives out


@pytest.mark.slow
def test_the_experts_of_a_run_are_recorded_and_replayed(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert main(["caches", "--run.directory", str(run), "--capacity", "1"]) == 0
    summary = json.loads((run / "caches" / "summary.json").read_text())
    most = summary["layers"] * summary["experts"]
    assert all(0 < row["loads"] <= most for row in summary["rows"] if row["policy"] != "category")
    assert (run / "plots" / "caches.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--capacity", "1.5"], "capacity=(1.5,) must be shares"),
        (["--trace", "trace.npz"], "expert_parameters is not known of a trace alone"),
        (["--chip", "h10"], "did you mean 'h100'?"),
    ],
)
def test_what_is_wrong_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["caches", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
