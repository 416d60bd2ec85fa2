# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`serving advise`: tables whose choices follow from their numbers."""

from __future__ import annotations

import dataclasses
import json

import pytest

from experiments.serving.__main__ import main
from jaxmoe.contrib.serving_lab.simulation.advice import advise
from tests.support.simulated import COST


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    path = tmp_path_factory.mktemp("advise")
    (path / "scores.txt").write_text("\n".join(str(i / 100) for i in range(99)))
    words = ["--draft_scores", str(path / "scores.txt"), "--stages", "2", "--answers", "1", "4"]
    assert main(["advise", "--run.directory", str(path / "out"), *words]) == 0
    return json.loads((path / "out" / "summary.json").read_text())["tables"]


def test_pages_grow_as_attention_caches_less(tables):
    rows = {(row[0], row[1]): row[2] for row in tables["attention"][1:]}
    sizes = [rows[kind, "page size"] for kind in ("multi-head", "own", "latent")]
    assert sizes == ["2 tokens", "16 tokens", "32 tokens"]
    waits = [rows[kind, "preempted"] for kind in ("multi-head", "latent")]
    assert waits == ["computed again", "to host memory"]
    batches = [int(rows[kind, "batch"].split()[0]) for kind in ("multi-head", "latent")]
    assert batches[0] < batches[1]


def test_each_choice_names_the_number_that_decides(tables):
    assert tables.keys() == {"attention", "answers", "stages", "drafts"}
    for table in tables.values():
        assert table[0][-1] == "decided by"
        assert all(any(map(str.isdigit, row[-1])) for row in table[1:])


def test_a_budget_of_keys_is_cheaper_and_two_stages_are_faster(tables):
    totals = [float(row[4]) for row in tables["answers"][1:]]
    assert totals[1] < totals[0] and totals[3] < totals[2]
    one, two = tables["stages"][1:]
    assert float(two[3]) > 1.9 * float(one[3]) and float(two[2]) > float(one[2])
    assert tables["drafts"][1][1] == "0.09"


@pytest.mark.slow
def test_instances_are_divided_between_phases(tmp_path, capsys):
    words = ["--instances", "2", "--workload.requests", "12", "--rates", "1", "4"]
    words += ["--workload.prompt_median", "50", "--workload.answer_median", "4"]
    assert main(["advise", "--run.directory", str(tmp_path), *words]) == 0
    assert "1 for prompts, 1 for answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "qwen"], "preset=qwen is unknown"),
        (["--instances", "1"], "instances=1 must be 0, or at least 2"),
        (["--rates", "4", "1"], "rates=(4.0, 1.0)"),
        (["--alpha", "1"], "alpha=1.0"),
    ],
)
def test_what_is_wrong_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["advise", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_largest_batch_that_was_compared_is_named():
    sizes = dataclasses.replace(COST.sizes, kv_bytes=1, pair_flops=0.0)
    chip = dataclasses.replace(COST.chip, flops=1e30)
    cost = dataclasses.replace(COST, sizes=sizes, chip=chip)
    found = {one.subject: one for one in advise(cost, 4, 4)}["batch"]
    assert found.choice.startswith("4096 answers")
    assert found.because == "larger batches than 4096 were not compared"
