# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.bench` at sizes that take a moment: what is measured, written and said."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import bench, bench_kernels, bench_step, measure
from experiments.bench_kernels import loads
from experiments.bench_step import StepBenchConfig
from experiments.cli import ExitCode
from experiments.measure import in_turns

SMALL = {
    "step": "--peer none --batch_size 1 --sequence_length 16 --model.embed_dim 16"
    " --model.num_layers 1 --model.moe.num_experts 4 --model.moe.expert_dim 8"
    " --model.attention.num_heads 2 --model.attention.num_kv_heads 2 --model.attention.head_dim 8"
    " --warm_up 0 --rounds 1",
    "kernels": "--rounds 1 --rows 48 --groups 3 --width 8 --hidden 8 --lengths 16"
    " --memory_lengths 16",
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Nor a large product, which is not what is tested."""
    monkeypatch.setattr(measure, "_PAUSE_SECONDS", 0.0)
    for room in (bench_kernels, bench_step):
        monkeypatch.setattr(room, "matmul_rate", lambda: 1e9)


@pytest.mark.parametrize("name", bench.BENCHES)
def test_what_a_bench_leaves(name, tmp_path, capsys):
    arguments = [name, "--run.directory", str(tmp_path / "new"), *SMALL[name].split()]
    assert bench.main(arguments) == ExitCode.DONE
    summary = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert (summary["status"], summary["bench"]) == ("done", name)
    said = capsys.readouterr().out
    if name == "step":
        assert summary["limit_seconds"] == summary["flops"] / 1e9
        assert summary["times_the_peer"] is None and summary["seconds"]["jaxmoe"]["runs"] == 1
        assert "of the limit" in said and "AdamW" in said
    else:
        measured = {(row["operation"], row["case"]) for row in summary["rows"]}
        grouped = {
            (f"grouped_{what}", case) for what in ("matmul", "swiglu") for case in loads(48, 3)
        }
        assert measured == grouped | {("flash_attention", "256 x 16")}
        assert all(row["ratio"] > 0.0 for row in summary["rows"]) and "one group" in said


def test_candidates_take_turns_and_warm_up():
    seen = []

    def run(name):
        seen.append(name)
        return float(len(seen))

    timings = in_turns({n: lambda n=n: run(n) for n in "ab"}, rounds=2, warm_up=1)
    assert seen == list("ababab")
    assert timings["a"].seconds == (3.0, 5.0) and timings["b"].median == 5.0


def test_loads_are_whole_and_complete():
    for sizes in loads(1000, 7).values():
        assert sizes.sum() == 1000 and sizes.min() >= 0 and sizes.dtype == np.int32


@pytest.mark.parametrize("field", ["rounds", "batch_size", "warm_up"])
def test_counts_that_make_no_sense(field):
    with pytest.raises(ValueError, match=f"^{field}=-1 must be at least"):
        StepBenchConfig(**{field: -1})
