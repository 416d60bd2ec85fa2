# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`serving simulate`: table, picture, page and summary of a small workload."""

from __future__ import annotations

import json
import shutil

import pytest

from experiments.serving.__main__ import main

SMALL = (
    "--workload.requests",
    "4",
    "--workload.answer_median",
    "4",
    "--workload.prompt_median",
    "50",
    "--rates",
    "2",
    "4",
)


def test_policies_are_compared_in_a_table_and_a_picture(tmp_path, capsys):
    words = ["--batching", "split_fuse", "prefill_first", *SMALL]
    assert main(["simulate", "--run.directory", str(tmp_path), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("qwen3_30b_a3b on 1 x 1 h100, 7529 pages of 16 tokens each")
    assert [line.split()[:2] for line in lines[2:6]] == [
        [name, rate] for rate in "24" for name in ("split_fuse", "prefill_first")
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "done" and len(summary["rows"]) == 4
    assert all(row["finished"] == 4 and row["within"] == 1.0 for row in summary["rows"])
    assert (tmp_path / "plots" / "goodput.png").stat().st_size > 1000
    assert "split_fuse" in (tmp_path / "report.html").read_text()


def test_weights_that_do_not_fit_leave_room_for_requests(tmp_path, capsys):
    words = ["--preset", "mixtral_8x7b", "--batching", "split_fuse", *SMALL]
    assert main(["simulate", "--run.directory", str(tmp_path), *words]) == 0
    assert "29% of the weights in host memory, 3" in capsys.readouterr().out
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert all(row["finished"] == 4 and row["computed"] > 100 for row in rows)


def test_a_fleet_is_compared_by_dispatch(tmp_path, capsys):
    words = ["--batching", "split_fuse", "--dispatch", "round_robin", "least_loaded"]
    words += ["--instances", "2", *SMALL]
    assert main(["simulate", "--run.directory", str(tmp_path), *words]) == 0
    assert "split_fuse least_loaded" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_simulated_with_the_times_of_its_compiled_steps(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    words = ["--engine.max_sequences", "2", "--engine.pieces", "1x8", "1x16", "2x16", "--repeats"]
    words += ["3", "--batching", "split_fuse", "--rates", "50", *SMALL[:-3]]
    assert main(["simulate", "--run.directory", str(run), *words]) == 0
    printed = capsys.readouterr().out
    assert "4 compiled shapes on cpu; a step takes the time of its shape" in printed
    assert "median error on a shape left out" in printed
    summary = json.loads((run / "simulate" / "summary.json").read_text())
    assert summary["measured"]["cost"] == "table" and summary["rows"][0]["finished"] == 4
    assert len(summary["measured"]["shapes"]) == 4
    assert (run / "simulate" / "plots" / "goodput.png").stat().st_size > 1000


def test_retention_and_scaling_are_compared(tmp_path, capsys):
    words = ["--batching", "split_fuse", "--dispatch", "pd_serve", "--instances", "2"]
    words += ["--retention", "lru", "swap_groups", "--scaling", "fixed", "polca", *SMALL]
    assert main(["simulate", "--run.directory", str(tmp_path), *words]) == 0
    out = capsys.readouterr().out
    assert "split_fuse swap_groups polca" in out and "J/token" in out
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert len(rows) == 8 and all(row["joules_per_token"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "--batching", "split_fuze"], "did you mean 'split_fuse'?"),
        (["simulate", "--chip", "h10"], "chip=h10 is unknown: did you mean 'h100'?"),
        (["simulate", "--instances", "0"], "instances=0"),
        (["simulate", "--rates", "0"], "rate=0.0"),
        (["simulate", "--cost", "table"], "cost=table is measured with the model of a run"),
        (["simulate", "--scaling", "slow"], "scaling=slow is unknown: did you mean 'slo'?"),
        (["simulat"], "unknown command 'simulat': did you mean 'simulate'?"),
    ],
)
def test_what_is_unknown_is_refused_with_the_nearest(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
