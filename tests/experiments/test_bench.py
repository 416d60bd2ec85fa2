# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests what `experiments.bench` counts and writes; never how fast anything is."""

import dataclasses
import json
import logging
import os
import sys

import chex
import pytest

from experiments.bench import __main__ as bench
from experiments.bench import kernels as bench_kernels
from experiments.bench import measure
from experiments.bench import products as bench_products
from experiments.bench.accelerator.attention import AttentionCase
from experiments.bench.kernels import loads
from experiments.bench.measure import OtherLoad, describe_load
from experiments.bench.peer import TrainingData, write_training_data
from experiments.bench.serving.idle import idle_seconds
from jaxmoe.data import CorpusConfig, Loader
from jaxmoe.routing import METHODS, GroupLimitConfig, SoftmaxTopKConfig
from pallas_kernels import flash_attention

SMALL_STEP = (
    "--model.num_layers",
    "1",
    "--model.embed_dim",
    "8",
    "--model.moe.expert_dim",
    "4",
    "--model.attention.num_heads",
    "2",
    "--model.attention.num_kv_heads",
    "2",
    "--model.attention.head_dim",
    "4",
    "--model.moe.num_experts",
    "4",
    "--batch_size",
    "2",
    "--sequence_length",
    "8",
    "--warm_up",
    "1",
    "--rounds",
    "3",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Remove pauses and large products."""
    monkeypatch.setattr(measure, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("experiments.bench.step.matmul_rate", lambda _: 1e9)
    monkeypatch.setattr("experiments.bench.kernels.matmul_rate", lambda: 1e9)
    monkeypatch.setattr("experiments.bench.routers.matmul_rate", lambda: 1e9)
    monkeypatch.setattr("experiments.bench.products.matmul_rate", lambda *_: 1e9)
    monkeypatch.setattr("experiments.bench.products.memory_rate", lambda _: 1e9)


@pytest.fixture
def one_of_each(monkeypatch):
    """Shrink products as far as possible."""
    small = bench_products.ProductSizes("small", 16, 8, 2, (2,), (64,), 8, 2, "float32")
    monkeypatch.setattr(bench_products, "SMALL", small)
    pairs = {name: bench_products.PAIRS[name] for name in ("w8a8", "w4a16")}
    monkeypatch.setattr(bench_products, "PAIRS", pairs)
    monkeypatch.setattr(bench_products, "GROUPED_PAIRS", ("w8a8",))
    monkeypatch.setattr(bench_products, "LOADS", ("zipf",))


def test_candidates_take_turns_and_warm_up_does_not_count():
    calls = []

    def run(name):
        calls.append(name)
        return float(len(calls))

    timings = measure.in_turns({"a": lambda: run("a"), "b": lambda: run("b")}, rounds=3, warm_up=1)
    assert calls == ["a", "b"] * 4
    assert timings["a"].seconds == (3.0, 5.0, 7.0)
    assert (timings["b"].median, timings["b"].best) == (6.0, 4.0)


def test_a_slow_candidate_ends_with_its_share_and_says_so(caplog):
    """It warms up once and is counted once; the others run to the end."""
    calls = []

    def run(name, seconds):
        calls.append(name)
        return seconds

    candidates = {"fast": lambda: run("fast", 1.0), "slow": lambda: run("slow", 70.0)}
    with caplog.at_level(logging.INFO, "jaxmoe.messages"):
        timings = measure.in_turns(candidates, rounds=3, warm_up=4, share=100.0)
    assert timings["slow"].seconds == (70.0,) and timings["fast"].seconds == (1.0,) * 3
    assert calls.count("slow") == 2 and calls.count("fast") == 7
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "slow: 70.0 s a run; it ends after 140 s with 1 counted, its share is 100 s"


def test_the_load_of_other_processes_is_told_apart_from_our_own(tmp_path, monkeypatch):
    times = tmp_path / "stat"
    monkeypatch.setattr(measure, "_CPU_TIMES", times)
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(measure.os, "times", lambda: (own["seconds"], 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(measure.time, "monotonic", lambda: own["now"])
    tick = os.sysconf("SC_CLK_TCK")
    own = {"seconds": 1.0, "now": 100.0}
    times.write_text(f"cpu  {5 * tick} 0 0 900 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
    load = OtherLoad()
    own.update(seconds=6.0, now=110.0)
    times.write_text(f"cpu  {16 * tick} 0 0 999 7 0 0 {tick} 0 0\n")  # 12 busy seconds, 5 our own
    assert load.share() == pytest.approx((12 - 5) / 20)
    text = describe_load(0.35)
    assert "other processes used 35% of its 2 processors" in text and "above 100%" in text
    assert "above 100%" not in describe_load(0.01)
    times.unlink()
    assert OtherLoad().share() is None and "is unknown" in describe_load(None)


def test_matmul_rate_is_positive():
    assert 1e6 < measure.matmul_rate() < 1e18


@pytest.mark.parametrize(("rows", "groups"), [(8192, 16), (100, 7), (3, 4)])
def test_loads_hold_all_rows(rows, groups):
    for case, sizes in loads(rows, groups).items():
        assert sizes.shape == (groups,), case
        assert sizes.sum() == rows and sizes.min() >= 0, case


def _summary(tmp_path, *arguments):
    code = bench.main([*arguments, "--run.directory", str(tmp_path / "run")])
    assert code == 0
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def test_sides_read_the_batches_of_the_embedded_corpus(tmp_path):
    """Whatever Python a side has, and whatever its library is."""
    path = str(tmp_path / "data.npy")
    write_training_data(path, 3, 2, 8)
    loader = Loader(CorpusConfig().build(), batch_size=2, sequence_length=8, seed=0)
    data = TrainingData(path)
    for step in range(3):
        chex.assert_trees_all_equal_shapes_and_dtypes(data.batch(step), loader.batch(step))
        chex.assert_trees_all_equal(data.batch(step), loader.batch(step))


@pytest.mark.slow
def test_step_alone(tmp_path, capsys):
    summary = _summary(tmp_path, "step", "--peer", "none", *SMALL_STEP)
    assert summary["times_the_peer"] is None
    assert list(summary["seconds"]) == ["jaxmoe float32", "jaxmoe bfloat16"]
    for dtype in ("float32", "bfloat16"):
        seconds, limit = summary["seconds"][f"jaxmoe {dtype}"], summary["limit_seconds"][dtype]
        assert seconds["runs"] == 3
        assert limit == pytest.approx(summary["flops"] / 1e9)
        assert summary["fraction_of_limit"][dtype] == pytest.approx(limit / seconds["median"])
    losses = [summary["loss"][f"jaxmoe {dtype}"] for dtype in ("float32", "bfloat16")]
    assert 5.0 < losses[0] < 7.0 and losses[1] == pytest.approx(losses[0], rel=0.01)
    assert set(summary["parts"]) == {"attention", "experts and their router", "AdamW"}
    assert "% of the limit" in capsys.readouterr().out


FAKE_PEER = """#!{python}
import json, pathlib, sys
given = json.loads(sys.stdin.readline())
config = json.loads((pathlib.Path(given["model"]) / "config.json").read_text())
print(json.dumps({{"sizes": config}}), flush=True)
for line in sys.stdin:
    request, dtype = line.split()
    step = [1000.0 if dtype == "float32" else 500.0, 5.5]
    print(json.dumps({{"rate": 5e9, "step": step}}[request]), flush=True)
"""


@pytest.mark.slow
def test_step_beside_a_peer(tmp_path, monkeypatch, capsys):
    """A peer that answers 1000 seconds receives the sizes of our model."""
    monkeypatch.setattr("experiments.bench.step._parts", lambda *_, **__: {})  # see test_step_alone
    peer = tmp_path / "peer"
    peer.write_text(FAKE_PEER.format(python=sys.executable))
    peer.chmod(0o755)
    summary = _summary(tmp_path, "step", "--peer_python", str(peer), *SMALL_STEP)
    medians = [summary["seconds"][f"jaxmoe {dtype}"]["median"] for dtype in ("float32", "bfloat16")]
    wanted = {"float32": 1000.0 / medians[0], "bfloat16": 500.0 / medians[1]}
    assert summary["times_the_peer"] == pytest.approx(wanted | {"best": 500.0 / min(medians)})
    assert summary["loss"]["transformers float32"] == 5.5
    sizes = summary["peer"]["sizes"]
    wanted = {"hidden_size": 8, "intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 2}
    assert {name: sizes[name] for name in wanted} == wanted
    out = " ".join(capsys.readouterr().out.split())
    assert "dense product in bfloat16 runs at 5 GFLOP/s" in out
    assert "times as fast as the peer, each at its best precision" in out


@pytest.mark.slow
def test_losses_are_those_of_transformers(tmp_path, monkeypatch):
    """The same parameters, batches and optimiser: both sides see the same losses."""
    pytest.importorskip("transformers", reason="transformers is not installed: extra hf")
    monkeypatch.setattr("experiments.bench.step._parts", lambda *_, **__: {})
    sizes = ("--model.embed_dim", "32", "--model.attention.head_dim", "16", "--rounds", "20")
    step = ("step", *SMALL_STEP, *sizes, "--precisions", "float32", "--sequence_length", "32")
    loss = _summary(tmp_path, *step)["loss"]
    assert loss["jaxmoe float32"] == pytest.approx(loss["transformers float32"], rel=2e-4)


def test_peer_of_another_model_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(
            ["step", *SMALL_STEP, "--model.embed_dim", "12", "--run.directory", str(tmp_path)]
        )
    assert stopped.value.code == 2
    assert "head_dim" in capsys.readouterr().err


def test_peer_that_does_not_start_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit) as stopped:
        bench.main(["step", *SMALL_STEP, "--run.directory", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert "did not run: it ended. Install the extra hf" in capsys.readouterr().err


@pytest.mark.large
def test_finetune_begins_with_the_loss_of_peft(tmp_path, capsys):
    pytest.importorskip("peft", reason="peft is not installed: extra hf")
    sizes = ["--model.num_layers", "1", "--model.embed_dim", "256", "--model.moe.expert_dim", "16"]
    sizes += ["--batch_size", "1", "--sequence_length", "16", "--rounds", "1", "--warm_up", "0"]
    summary = _summary(tmp_path, "finetune", *sizes, "--unroll", "1")
    assert summary["first_loss_difference"] < 1e-4
    assert summary["trained"]["jaxmoe"] == summary["trained"]["peft"]
    assert min(summary["peak_bytes"].values()) > 1e8
    assert "times as fast as peft" in capsys.readouterr().out


@pytest.mark.large
def test_serve_answers_as_transformers_does(tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed: extra hf")
    sizes = ["--model.num_layers", "1", "--model.embed_dim", "256", "--model.moe.expert_dim", "16"]
    sizes += ["--requests", "3", "--max_sequences", "2", "--prompt_length", "8"]
    sizes += ["--answer_length", "8", "--rounds", "1", "--warm_up", "0"]
    summary = _summary(tmp_path, "serve", *sizes)
    assert summary["equal_answers"] == {"engine": 1.0, "generate": 1.0, "transformers": 1.0}
    assert min(summary["cpu_seconds"].values()) > 0
    assert "times as fast as transformers" in capsys.readouterr().out


@pytest.mark.large
def test_kernels(tmp_path, capsys, monkeypatch):
    unmeasured = {"product_limits": {"memory": 1e9}, "products": bench_products.hopper_rows()}
    monkeypatch.setattr(bench_products, "products", lambda *_: unmeasured)
    small = ("--rows", "64", "--groups", "4", "--width", "8", "--hidden", "6", "--rounds", "1")
    lengths = ("--lengths", "16", "--memory_lengths", "16", "32")
    summary = _summary(tmp_path, "kernels", *small, *lengths)
    rows = {(row["operation"], row["case"]) for row in summary["rows"]}
    cases = loads(64, 4)
    grouped = {(name, case) for name in ("grouped_matmul", "grouped_swiglu") for case in cases}
    by_length = ("flash_attention", "selective_scan", "state_space_dual")
    assert rows == {*grouped, *((name, "256 x 16") for name in by_length)}
    assert [row["length"] for row in summary["attention_temporary_bytes"]] == [16, 32]
    passes = [(row["pass"], row["candidate"]) for row in summary["gpu_attention"]]
    assert passes == [(p, c) for p in ("forward", "backward") for c in ("ours", "cuDNN", "XLA")]
    assert all(row["seconds"] is None for row in summary["gpu_attention"])
    printed = capsys.readouterr().out
    assert "of dense" in printed
    assert printed.count("unmeasured, there is no GPU") == 6 + 4
    assert "unmeasured, there is no GPU (to reach 0.7)" in printed


def test_products(one_of_each):
    """Candidates of every case, limits, and rows that need a GPU."""
    summary = bench_products.products(1)
    cases: dict = {}
    for row in summary["products"]:
        cases.setdefault((row["operation"], row["case"], row["pass"]), {})[row["candidate"]] = row
    operands = {
        ("quantized_matmul few", "small 2 x 16 x 8"): 2 * 16 + 2 * 16 * 8 + 2 * 2 * 8,
        ("quantized_matmul many", "small 64 x 16 x 8"): 64 * 16 + 2 * 16 * 8 + 2 * 64 * 8,
    }
    for (operation, case), numbers in operands.items():
        rows = cases[operation, case, "forward"]
        assert set(rows) == {"dense", "w8a8", "w4a16", "mixed"}
        products = 2 * 2.0 * (2 if "few" in operation else 64) * 16 * 8
        limit = max(4 * numbers, products) / 1e9
        assert rows["dense"]["limit_seconds"] == pytest.approx(limit)
        assert rows["dense"]["fraction_of_limit"] == pytest.approx(limit / rows["dense"]["seconds"])
        ratio = rows["dense"]["seconds"] / rows["w8a8"]["seconds"]
        assert rows["w8a8"]["ratio"] == pytest.approx(ratio)
    assert cases["quantized_matmul many", "small 64 x 16 x 8", "forward"]["w8a8"]["target"] == 0.9
    for name in ("forward", "d rows", "d weights"):
        rows = cases["grouped_matmul", "small zipf 8 x 16 x 8", name]
        rounded = {"w8a8"} if name == "forward" else set()
        assert set(rows) == {"dense", "ours", "ragged_dot", "torch", *rounded}
        assert rows["ours"]["seconds"] > 0.0
        assert rows["torch"]["seconds"] is None and "PyTorch" in rows["torch"]["reason"]
    wanted = {row["candidate"]: row["target"] for row in summary["products"][-4:]}
    assert wanted == {"ours": 0.7, "fp8": 1.5, "w4a16": 2.5, "mixed": 1.5}
    assert bench_products.in_words(summary)[0].startswith("limits: TFLOP/s float32 0.001")


def test_refused_candidate_is_a_row(monkeypatch, one_of_each):
    def refuse(*_, **__):
        raise ValueError("no such product")

    monkeypatch.setattr(bench_products, "quantized_matmul", refuse)
    limits = bench_products.ProductLimits(dict.fromkeys(("float32", "int8"), 1e9), 1e9)
    rows = list(bench_products._quantised(bench_products.SMALL, limits, 1, None))
    assert {row["reason"] for row in rows if row["candidate"] == "w8a8"} == {"no such product"}
    assert all(row["seconds"] > 0 for row in rows if row["candidate"] == "dense")


def test_published_widths():
    olmoe, qwen = bench_products.accelerator_widths()
    assert (olmoe.width, olmoe.hidden, olmoe.groups) == (2048, 2048, 64)
    assert (qwen.width, qwen.hidden, qwen.groups) == (2048, 1536, 128)


def test_attention_on_a_gpu_is_counted():
    """Rows of two candidates that run here."""
    candidates = {
        name: lambda q, k, v, name=name: flash_attention(q, k, v, implementation=name)[0]
        for name in ("xla", "reference")
    }
    case = AttentionCase(batch=2, length=8, heads=1, key_heads=1, width=4)
    rows = bench_kernels._gpu_rows(candidates, case, rounds=1, limit=1e9)
    assert [row["ratio"] for row in rows if row["candidate"] == "reference"] == [1.0, 1.0]
    for row in rows:
        products = 2 * 2 * 1 * 8**2 * 4 * (1.0 if row["pass"] == "forward" else 2.5)
        assert row["flops_per_second"] == pytest.approx(products / row["seconds"])
        assert row["fraction_of_limit"] == pytest.approx(row["flops_per_second"] / 1e9)
    assert bench_kernels._gpu_in_words(rows)[0].endswith("of cuDNN")


def test_routers(tmp_path, monkeypatch, capsys):
    """A method that does not fit is a row; the limit is one matrix product, or three."""
    narrow = dataclasses.replace(
        METHODS["mixtral"],
        router=SoftmaxTopKConfig(groups=GroupLimitConfig(num_groups=3, top_groups=2)),
    )
    monkeypatch.setitem(METHODS, "narrow", narrow)
    small = ("--tokens", "32", "--sequence_length", "8", "--num_experts", "4", "--top_k", "2")
    chosen = ("--width", "8", "--rounds", "1", "--methods", "olmoe", "narrow")
    small += ("--tiles", "2", "8", "--experts", "4", "8")
    summary = _summary(tmp_path, "routers", *small, *chosen)
    rows = {row["method"]: row for row in summary["rows"]}
    assert list(rows) == ["plain top-k", "olmoe"]
    assert rows["plain top-k"]["ratio"] == rows["plain top-k"]["forward_ratio"] == 1.0
    assert rows["olmoe"]["seconds"] > 0.0 and rows["olmoe"]["forward_seconds"] > 0.0
    assert summary["limit_seconds"]["forward"] == pytest.approx(2 * 32 * 8 * 4 / 1e9)
    assert summary["limit_seconds"]["with_gradients"] == pytest.approx(6 * 32 * 8 * 4 / 1e9)
    assert "narrow" in summary["refused"]
    table = {(row["num_experts"], row["tile"]): row for row in summary["padding"]}
    assert list(table) == [(4, 2), (4, 8), (8, 2), (8, 8)]
    for (experts, tile), row in table.items():
        assert 0.0 < row["padding"] < tile * experts / 64 and row["even_load"] == 64 / experts
        by_scope = [row[scope] for scope, tokens in (("sequence", 8), ("batch", 32))]
        has_loads = [tokens * 2 >= tile * experts for tokens in (8, 32)]
        assert [changes is not None for changes in by_scope] == has_loads
        assert all(changes["padding"] == 0.0 for changes in by_scope if changes)
    assert sum(table[4, 2]["sequence"].values()) > 0.0
    assert "narrow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("step", "--rounds", "0"), "rounds=0 must be at least 1"),
        (("step", "--warm_up", "-1"), "warm_up=-1"),
        (("step", "model.moe:none"), "has no peer"),
        (("step", "--model.vocab_size", "16"), "must be at least 256"),
        (("kernels", "--groups", "0"), "groups=0 must be at least 1"),
        (("routers", "--top_k", "0"), "top_k=0 must be at least 1"),
        (("routers", "--sequence_length", "3"), "must be a multiple of"),
        (("routers", "--methods", "top1"), "there is no method 'top1'"),
    ],
)
def test_bad_sizes_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_chunks(tmp_path, capsys, monkeypatch):
    """Operations of a layer on 8 devices, each measured on all tokens and on a half."""
    monkeypatch.setattr("experiments.bench.chunks.PARTS", (1, 2))
    sizes = ("--tokens", "8", "--num_experts", "8", "--top_k", "2", "--width", "4")
    more = ("--expert_dim", "4", "--dtype", "float32", "--rounds", "1")
    summary = _summary(tmp_path, "chunks", *sizes, *more)
    assert summary["devices"] == {"expert": 8, "expert_tensor": 1}
    assert list(summary["costs"]) == ["all_to_all", "experts"]  # nothing to gather
    assert [row["chunks"] for row in summary["rows"]] == [1, 2]
    assert all(row["measured_seconds"] > 0 for row in summary["rows"])
    costs = summary["costs"].values()
    exchanged, computed = (cost["alpha"] + cost["beta"] for cost in costs)
    assert summary["rows"][0]["predicted_seconds"] == pytest.approx(2 * exchanged + computed)
    assert 8 % summary["num_chunks"] == 0
    assert f"--execution.dispatcher.num_chunks {summary['num_chunks']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tokens", "12"), "tokens=12 must be a multiple of 8"),
        (("--top_k", "65"), "top_k=65 must not exceed num_experts=64"),
        (("--expert_tensor", "3"), "expert_dim=256 must be divisible by expert_tensor=3"),
        (("--expert", "3"), "mesh (expert=3) needs 3 devices, there are 8"),
    ],
)
def test_chunks_refuses_bad_sizes(tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["chunks", *arguments, "--run.directory", str(tmp_path / "run")])
    assert words in " ".join(capsys.readouterr().err.split())  # argparse wraps lines


def test_a_device_waits_from_the_end_of_a_step_until_the_next_is_launched():
    launches, ends = [0.0, 1.0, 5.0], [2.0, 4.0, 6.0]
    assert idle_seconds(launches, ends).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("first_request", ["penalties", "grammar"])
def test_the_waiting_of_a_device_is_measured(first_request, tmp_path, capsys):
    small = [*SMALL_STEP[:14], "--model.vocab_size", "32"]
    sizes = ["--batches", "1", "3", "--answer_length", "40", "--rounds", "1"]
    sizes += ["--first_request", first_request]
    arguments = ["idle", *small, *sizes, "--run.directory", str(tmp_path / "run")]
    assert bench.main(arguments) == 0
    batches = json.loads((tmp_path / "run" / "summary.json").read_text())["batches"]
    assert list(batches) == ["1", "3"]
    for row in batches.values():
        assert 0.0 <= row["idle_share"] <= 1.0 and row["step_seconds"] > 0.0
    assert "the device waits for" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["idle", "--answer_length", "8"])
