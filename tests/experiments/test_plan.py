# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.plan`: the page and the summary in closed form, refusals, and compiled plans."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from experiments.cli import flags as cli
from experiments.cli.flags import ExitCode
from experiments.plan import __main__ as plan
from experiments.plan import judge
from experiments.plan.chosen import chosen_execution, flags_of
from experiments.plan.config import RECIPES as PLANNED
from experiments.plan.config import step_plan
from experiments.plan.kernels_part import kernels_part, predict_by_kernels
from experiments.plan.page import measured_table
from experiments.plan.units import size_in_words
from experiments.recipes import RECIPES
from jaxmoe.planning import compile_ahead
from jaxmoe.planning.compile_ahead import CompilerCrashError, in_child
from jaxmoe.planning.compilers import topologies
from jaxmoe.planning.hardware import CHIPS, parse_topology
from jaxmoe.planning.hlo import kernel_traffic, moved_outside
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.search import EVERYTHING, Space, search
from sharding.mesh import MeshConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]


def planned(tmp_path, capsys, *argv):
    """Exit code, page, summary."""
    code = plan.main([*argv, "--run.directory", str(tmp_path / "plan")])
    summary = json.loads((tmp_path / "plan" / "summary.json").read_text())
    return code, capsys.readouterr().out, summary


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as stopped:
        plan.main(argv)
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    return capsys.readouterr().err


def test_a_plan_in_closed_form(tmp_path, capsys):
    argv = ("tiny", "--topology", "gpu:h100:8", "--compiles", "0")
    code, page, summary = planned(tmp_path, capsys, *argv)
    assert (code, summary["status"]) == (ExitCode.DONE, "done")
    assert summary["total"] == pytest.approx(sum(summary["memory"].values()))
    assert summary["arguments"] + summary["temporaries"] == pytest.approx(summary["total"])
    for words in ("memory per device", "gradients", "gradients of copies over", "predicted step"):
        assert words in page, words
    assert len(summary["runners_up"]) == 4 and all(
        one["why"] in page for one in summary["runners_up"]
    )
    flags = " ".join(summary["flags"])
    assert page.rstrip().endswith(f"flags for pretrain   {flags}")
    assert summary["execution"]["mesh"]["stage"] == 1 and "--execution.mesh.data" in flags


def test_overlap_hides_messages_of_a_given_plan(tmp_path, capsys):
    argv = ("tiny", "--topology", "gpu:h100:8", "--compiles", "0", "--execution.mesh.data", "8")
    _, page, summary = planned(tmp_path, capsys, *argv)
    assert summary["hidden_seconds"] == 0.0 and "hidden beside products" not in page
    _, page, hiding = planned(tmp_path, capsys, *argv, "--network.overlap", "0.5")
    work = max(hiding["compute_seconds"], hiding["memory_seconds"])
    assert 0.0 < hiding["hidden_seconds"] <= work / 2 and "hidden beside products" in page
    gained = summary["step_seconds"] - hiding["step_seconds"]
    assert gained == pytest.approx(hiding["hidden_seconds"])
    assert "network.overlap=2.0 must be from 0 to 1" in refused(
        capsys, *argv, "--network.overlap", "2"
    )


def test_hosts_price_the_plan_and_its_search(tmp_path, capsys):
    """Links between all hosts alike, in two halves, and alternating."""
    argv = ("tiny", "--topology", "gpu:h100:64", "--compiles", "0", "--training.batch_size", "64")
    meshes = ("--execution.mesh.replica", "2", "--execution.mesh.data", "32")
    fixed, seconds = (*argv, *meshes, "--network.hosts"), {}
    for hosts in ("ib*8", "ib*4 roce*4", "ib roce ib roce ib roce ib roce", "ethernet*8"):
        _, page, summary = planned(tmp_path / hosts.replace("*", ""), capsys, *fixed, hosts)
        seconds[hosts] = summary["step_seconds"]
        assert "order of hosts" in page
    alike, halves, alternating, slow = seconds.values()
    # Halves: only the replicas meet over Ethernet. Alternating: the rings of the data do.
    assert alike < halves < alternating < slow
    error = refused(capsys, *fixed, "ib*7")
    assert "network.hosts has 7 hosts, which must divide the 64 devices" in error


def test_only_the_given_mesh_is_planned(tmp_path, capsys):
    argv = ("--topology", "tpu:v5e:2x2", "--compiles", "0", "--execution.mesh.tensor", "2")
    _, _, summary = planned(tmp_path, capsys, "tiny", *argv)
    assert summary["mesh"] == {"data": 2, "tensor": 2} and summary["meshes"] == 1
    error = refused(capsys, "tiny", *argv, "--execution.mesh.data", "4")
    assert "needs 8 devices, there are 4" in error


def test_a_mesh_that_shards_sequences_prints_its_form(tmp_path, capsys):
    argv = ("--topology", "gpu:h100:8", "--compiles", "0", "--execution.mesh.seq", "8")
    argv += ("execution.sequence-parallel:auto",)
    _, page, summary = planned(tmp_path, capsys, "tiny", *argv)
    assert summary["mesh"] == {"seq": 8}
    for words in (
        "attention over seq   ring: mesh.seq=8 does not divide the 4 query and 4 key heads",
        "busiest link in its busiest direction (switch, 450 GB/s)",
        "query heads per key head",
        "1 (this model)",
        "from 2 query heads per key head on ring loads the links less",
        "--execution.mesh.seq 8 execution.sequence_parallel:auto",
    ):
        assert words in page, words


def test_a_mesh_with_stages_prints_its_schedules(tmp_path, capsys):
    argv = ("--topology", "gpu:h100:8", "--compiles", "0", "--execution.mesh.stage", "2")
    argv += ("--execution.mesh.data", "4", "--training.accumulation", "4", "--model.num_layers")
    argv += ("4", "--execution.pipeline.chunks", "2", "--training.batch_size", "32")
    _, page, summary = planned(tmp_path, capsys, "tiny", *argv)
    assert summary["mesh"] == {"stage": 2, "data": 4}
    idle = [round(one["idle"], 3) for one in summary["schedules"]]
    assert idle == [0.2, 0.2, 0.111, 0.158, 0.086]
    for words in (
        "gpipe ",
        "interleaved ",
        "interleaved x2 (this plan)",
        "interleaved, deferred",
        "interleaved x2, deferred",
        "streams of the pipeline",
        "activations over stage",
        "vocabulary over stage",
        "stage 0  F0a F1a F0b F1b",
        "--execution.rules zero2 gathers them once a step",
        "--execution.mesh.stage 2 --execution.mesh.data 4 --execution.pipeline.chunks 2",
    ):
        assert words in page, words
    error = refused(capsys, "tiny", *argv, "--model.num_layers", "6")
    assert "be divisible by execution.mesh.stage x execution.pipeline.chunks = 4" in error


def test_the_number_of_micro_batches_is_searched(tmp_path, capsys):
    argv = ("d8", "--topology", "tpu:v5e:4x4", "--compiles", "0", "--execution.mesh.data", "16")
    _, page, summary = planned(tmp_path, capsys, *argv)
    number = summary["accumulation"]
    assert 1 < number < 32 and f"--training.accumulation {number}" in page
    assert f"512 x 4096 tokens, {number} micro-batches of {512 // number}" in page
    kept = planned(tmp_path, capsys, *argv, "--training.accumulation", "32")[2]
    assert kept["accumulation"] == 32 and "--training.accumulation" not in kept["flags"]
    assert kept["step_seconds"] > summary["step_seconds"]
    assert kept["total"] < summary["total"] <= summary["available"]


def test_flags_of_a_plan_make_the_held_out_batch_divide(tmp_path, capsys):
    argv = ("d8", "--topology", "tpu:v5e:4x4", "--compiles", "0", "--execution.mesh.data", "16")
    summary = planned(tmp_path, capsys, *argv)[2]
    assert summary["flags"][-2:] == ["--evaluation.batch_size", "16"]


def test_flags_of_every_arrangement_are_read_back():
    config, topology = PLANNED["tiny"](), parse_topology("cpu:8")
    config = dataclasses.replace(
        config, training=dataclasses.replace(config.training, batch_size=32)
    )
    usual, base = config.execution, step_plan(config.pretrain, topology, MeshConfig())
    meshes = [
        MeshConfig(data=4, tensor=2),
        MeshConfig(replica=2, data=2, expert=2),
        MeshConfig(stage=2, data=4),
    ]
    found = search(base, meshes, topology.chip, keep=100, space=EVERYTHING)
    assert len(found.fitting) == found.num_arrangements > 20
    for one in found.fitting:
        words = ["tiny", *flags_of(one, config, usual)]
        _, read = cli.parse(RECIPES, "tiny", words, "pretrain", "")
        assert read.execution == chosen_execution(config, one), words
        assert read.training.accumulation == one.plan.accumulation


def test_calibration_moves_the_plan(tmp_path, capsys, monkeypatch):
    """A compiler that needs 5 MB more than the closed form at every depth."""
    compiled, more = [], 5_000_000

    def compile_with(config, topology, candidate, layers=None):
        run = judge.run_of(config, candidate, layers)
        cut = step_plan(run, topology, run.execution.mesh)
        compiled.append(cut.model.num_layers)
        temporaries = int(estimate_memory(cut, "tpu").temporaries) + more
        figures = {"temporaries": temporaries, "total": 1, "arguments": 1}
        return {"kind": "CompiledStep", "traffic": None, **figures}

    monkeypatch.setattr(judge, "_compile", compile_with)
    monkeypatch.setattr(plan, "check_compiler", lambda topology: None)
    argv = ("tiny", "--topology", "tpu:v5e:2x2", "--model.num_layers", "21", "--calibrate", "True")
    _, page, summary = planned(tmp_path, capsys, *argv, "--execution.remat", "none")
    # Four layers a turn of the loop, one left over: three of five turns.
    assert compiled == [13, 21] and "from fewer layers" in page
    predicted = summary["calibrated"]["predicted"]
    assert predicted == pytest.approx(summary["temporaries"] + more, abs=2)


@pytest.mark.parametrize(
    "layers, words",
    [
        ("4", "4 layers are too few to cut; the closed form is kept"),
        ("24", "a model of 16 layers does not fit; the closed form is kept"),
    ],
)
def test_calibration_says_where_it_keeps_the_closed_form(
    tmp_path, capsys, monkeypatch, layers, words
):
    def compile_with(config, topology, candidate, layers=None):
        if layers is not None:
            return {"kind": "DoesNotFit", "needed": None, "text": "no room"}
        figures = dict.fromkeys(("temporaries", "total", "arguments"), 1)
        return {"kind": "CompiledStep", "traffic": None, **figures}

    monkeypatch.setattr(judge, "_compile", compile_with)
    monkeypatch.setattr(plan, "check_compiler", lambda topology: None)
    argv = ("tiny", "--topology", "tpu:v5e:2x2", "--model.num_layers", layers)
    argv += ("--calibrate", "True", "--execution.mesh.data", "4")
    _, page, summary = planned(tmp_path, capsys, *argv)
    assert words in page and summary["calibrated"] is None


def test_predictions_for_this_machine_carry_their_error():
    config, topology = PLANNED["tiny"](), parse_topology("cpu:8")
    space = Space(has_micro_batches=True)
    found = plan.find(config, topology, is_fixed=False, space=space)
    candidate = found.fitting[0]
    half = {"matmul_rate": 1e11, "step_seconds": 0.25, "memory": candidate.memory.total / 2}
    step, memory = measured_table(candidate, {"measured": half}).splitlines()[1:3]
    assert memory.split()[-1] == "+100%"
    assert step.split()[-1] == f"{100 * (float(step.split()[2]) / 0.25 - 1):+.0f}%"


def test_a_long_compile_shows_its_phase(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(
        "import pathlib, sys, time\n"
        "file = sys.argv[1]\n"
        "pathlib.Path(file + '.phase').write_text('compiling with XLA')\n"
        "time.sleep(1)\n"
        "pathlib.Path(file + '.result').write_text('{\"done\": true}')\n"
    )
    monkeypatch.chdir(tmp_path)
    seen = []
    result = in_child(
        "slow",
        {},
        parse_topology("cpu:2"),
        on_wait=lambda seconds, phase: seen.append((seconds, phase)),
        seconds=0.2,
    )
    assert result == {"done": True} and seen[-1][1] == "compiling with XLA"
    assert 0.2 <= seen[0][0] < seen[-1][0]


def test_a_child_of_another_python_loads_its_own_libtpu(tmp_path, monkeypatch):
    """Importing libtpu sets TPU_LIBRARY_PATH for the children; the path of a user stays."""
    (tmp_path / "libtpu.py").write_text("")
    (tmp_path / "tell.py").write_text(
        "import json, os, pathlib, sys\n"
        "told = {'path': os.environ.get('TPU_LIBRARY_PATH')}\n"
        "pathlib.Path(sys.argv[1] + '.result').write_text(json.dumps(told))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = importlib.util.spec_from_file_location("libtpu", tmp_path / "libtpu.py")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "libtpu" else find(name)
    )
    other, topology = tmp_path / "python", parse_topology("cpu:2")
    other.symlink_to(sys.executable)
    for path, seen in ((tmp_path / "libtpu.so", None), ("/a/libtpu.so", "/a/libtpu.so")):
        monkeypatch.setenv("TPU_LIBRARY_PATH", str(path))
        assert in_child("tell", {}, topology, python=str(other)) == {"path": seen}
        assert in_child("tell", {}, topology) == {"path": str(path)}


def test_nothing_fits_prints_remedies(tmp_path, capsys):
    argv = ("--topology", "tpu:v5e:2x2", "--compiles", "0", "--training.batch_size", "4")
    argv += ("--training.accumulation", "1", "--training.sequence_length", "128")
    argv += ("--search", "mesh")
    code, page, summary = planned(tmp_path, capsys, "mixtral_8x7b", *argv)
    assert (code, summary["status"]) == (ExitCode.BAD_CONFIGURATION, "nothing fits")
    missing = size_in_words(summary["needed"] - summary["available"])
    assert f"nothing fits tpu:v5e:2x2: the closest mesh, {summary['closest']}, needs" in page
    assert f"{missing} too much (closed form, nothing was compiled)" in page
    assert "--execution.precision.parameters bfloat16" in page


def test_a_refusal_of_the_compiler_is_a_verdict_and_the_next_plan_is_compiled(
    tmp_path, capsys, monkeypatch
):
    """The fastest plan is refused, the next crashes the compiler, and the third compiles."""
    compiled = []

    def in_child(module, job, topology, on_wait):
        compiled.append(json.dumps(job["config"], sort_keys=True))
        if len(compiled) == 1:
            return {"kind": "CompilerRefusal", "text": "refused: INTERNAL: no such layout"}
        if len(compiled) == 2:
            raise CompilerCrashError("experiments.plan.child ended with -6:\nF0 check failed")
        figures = dict.fromkeys(("temporaries", "total", "arguments"), 1)
        return {"kind": "CompiledStep", "traffic": None, **figures}

    monkeypatch.setattr(judge, "in_child", in_child)
    monkeypatch.setattr(plan, "check_compiler", lambda topology: None)
    argv = ("tiny", "--topology", "tpu:v5e:2x2", "--search", "mesh", "--compiles")
    code, page, summary = planned(tmp_path, capsys, *argv, "3")
    assert (code, summary["status"]) == (ExitCode.DONE, "done")
    assert len(compiled) == len(set(compiled)) == 3
    assert "refused: INTERNAL: no such layout" in page
    assert "the compiler crashed: F0 check failed" in page
    assert len(summary["rejected"]) == 2

    compiled.clear()
    code, page, summary = planned(tmp_path / "two", capsys, *argv, "2")
    assert (code, summary["status"]) == (ExitCode.BAD_CONFIGURATION, "nothing fits")
    assert "refused: INTERNAL: no such layout" in page and "by its compiler" in page


def test_after_a_refusal_plans_with_another_dispatcher_come_first(tmp_path, capsys, monkeypatch):
    """A compiler without a collective refuses every plan that needs it, however fast."""
    tried = []

    def in_child(module, job, topology, on_wait):
        tried.append(job["config"]["execution"]["dispatcher"]["kind"])
        if tried[-1] == tried[0]:
            return {"kind": "CompilerRefusal", "text": "refused: INTERNAL: no such collective"}
        figures = dict.fromkeys(("temporaries", "total", "arguments"), 1)
        return {"kind": "CompiledStep", "traffic": None, **figures}

    monkeypatch.setattr(judge, "in_child", in_child)
    monkeypatch.setattr(plan, "check_compiler", lambda topology: None)
    argv = ("qwen3_30b_a3b", "--topology", "tpu:v5e:4x4", "--model.num_layers", "4")
    argv += ("--training.accumulation", "1", "--execution.rules", "zero2", "--compiles", "2")
    code, page, summary = planned(tmp_path, capsys, *argv, "--execution.remat", "dots")
    assert (code, summary["status"]) == (ExitCode.DONE, "done")
    assert tried == ["all_gather", "all_to_all"], "the five fastest all gather"
    assert "refused: INTERNAL: no such collective" in page


def test_errors_of_a_compilation_are_verdicts(monkeypatch):
    topology = parse_topology("cpu:1")

    def fail(error):
        def trace(step, mesh):
            raise error

        return trace

    step = step_plan(PLANNED["tiny"](), topology, MeshConfig())
    for error, wanted in (
        (jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed\nmore"), "refused: INTERNAL: Mosaic"),
        (NotImplementedError("no rule"), "refused: no rule"),
        (ValueError("a shape does not divide"), "refused: a shape does not"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 3.0G of 1.0G hbm"), "Used 3.0G"),
    ):
        monkeypatch.setattr(compile_ahead, "trace_step", fail(error))
        found = compile_ahead.compile_step(step, topology)
        assert wanted in found.text
        assert type(found).__name__ == ("DoesNotFit" if "Used" in wanted else "CompilerRefusal")


def test_kernels_of_a_compiled_step_predict_it(tmp_path, capsys, monkeypatch):
    """The page lists them by kind, longest first, and the collectives after them."""
    text = (ROOT / "tests" / "golden" / "hlo" / "h100.txt").read_text()
    sent = {"kind": "all-reduce", "axes": ["data"], "count": 1, "result_bytes": 8}
    compiled = {
        "kind": "CompiledStep",
        "seconds": 2.0,
        "arguments": 1,
        "temporaries": 2,
        "total": 3,
        "kernels": [dataclasses.asdict(row) for row in kernel_traffic(text)],
        "traffic": [sent | {"wire_bytes": 0.9e9}],
    }
    monkeypatch.setattr(topologies, "has_cuda_plugin", lambda: True)
    monkeypatch.setattr(judge, "in_child", lambda *arguments, **options: dict(compiled))
    argv = ("tiny", "--topology", "gpu:h100:8", "--execution.mesh.data", "8")
    code, page, summary = planned(tmp_path, capsys, *argv)
    assert code == ExitCode.DONE
    prediction = predict_by_kernels(compiled, {"data": 8}, CHIPS["h100"])
    assert prediction is not None
    assert prediction.collectives == pytest.approx(2e-3 + 7 * 5e-6)
    assert summary["compiled"]["step_seconds"] == prediction.step == pytest.approx(0.002, rel=0.02)
    assert f"predicted step       {prediction.step:.3g} s by its kernels" in page
    table = kernels_part(prediction, CHIPS["h100"])
    assert table in page
    lines = [line.split("  ")[1] for line in table.splitlines() if line.startswith("  ")]
    assert set(lines[:-1]) == {row.kind for row in prediction.rows} and lines[-1] == "collectives"
    assert lines[0] == "conversions"
    moved = size_in_words(moved_outside(prediction.rows))
    assert f"moved outside kernels and products: {moved} at 2.93 TB/s" in table
    assert table.endswith("as measured on an H100")
    other = kernels_part(prediction, CHIPS["a100"])
    assert other.endswith("the shares of its peaks that an H100 reached")
    assert predict_by_kernels(compiled | {"kernels": None}, {"data": 8}, CHIPS["v5e"]) is None


def test_refusals_before_any_compile(capsys, monkeypatch):
    monkeypatch.setattr(judge, "in_child", None)  # would fail
    assert "did you mean 'v5e'" in refused(capsys, "--topology", "tpu:v5ee:2x2")
    error = refused(capsys, "--topology", "gpu:mi300x:8")
    assert "there is none of a mi300x (there are h100, h200, a100): --compiles 0" in error
    assert "must be 0 (closed form only)" in refused(capsys, "--compiles", "-1")
    error = refused(capsys, "mixtral_8x7b", "--topology", "cpu:7")
    assert "none of the 4 meshes of 7 devices divides this model and batch" in error
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else real(name)
    )
    assert "pip install 'jaxmoe[plan]'" in refused(capsys, "--topology", "tpu:v5e:2x2")
    monkeypatch.setattr(topologies, "has_cuda_plugin", lambda: False)
    error = refused(capsys, "--topology", "gpu:h100:8")
    assert "the CUDA plugin, which compiles for a GPU that is not attached, is not" in error
    assert "pip install 'jaxmoe[cuda]'; --compiles 0 plans in closed form" in error


def command(*argv, timeout=1500):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "experiments.plan", *argv],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.large
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "mesh", [(), ("--execution.mesh.replica", "4", "--execution.mesh.tensor", "2")]
)
def test_the_plan_of_this_machine_runs(tmp_path, mesh):
    """Arguments and results exactly, temporaries within a quarter, steps that were measured."""
    done = command("tiny", "--topology", "cpu:8", *mesh, "--run.directory", str(tmp_path))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    compiled = summary["compiled"]
    assert summary["arguments"] == compiled["arguments"]
    assert compiled["expected_results"] == compiled["results"]
    assert summary["temporaries"] == pytest.approx(compiled["temporaries"], rel=0.25)
    assert compiled["measured"]["step_seconds"] > 0 and compiled["traffic"]
    assert re.search(r"^  step, seconds .* [+-]\d+%$", done.stdout, re.M)


@pytest.mark.large
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "argv",
    [
        # 30.5e9 parameters, AdamW, on a device of 15.75 GiB; and of a v5p pod.
        ("qwen3_30b_a3b", "--topology", "tpu:v5e:16x16", "--training.batch_size", "256"),
        ("qwen3_30b_a3b", "--topology", "tpu:v5p:4x4x4", "--training.batch_size", "64"),
        ("d8", "--topology", "tpu:v5e:4x4", "--training.batch_size", "16"),
        ("olmoe_1b_7b", "--topology", "tpu:v5e:8x8", "--training.batch_size", "64"),
    ],
)
def test_large_models_compile_within_a_chip(tmp_path, argv):
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (extra [plan])")
    data = ("--execution.mesh.data", argv[-1], "--training.accumulation", "1")
    data += ("--execution.remat", "full")
    done = command(*argv, *data, "--run.directory", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # nothing of the compiler's
    summary = json.loads((tmp_path / "summary.json").read_text())
    compiled = summary["compiled"]
    assert summary["arguments"] == compiled["arguments"]
    assert compiled["expected_results"] == compiled["results"]
    assert summary["temporaries"] == pytest.approx(compiled["temporaries"], rel=0.25)


@pytest.mark.large
@pytest.mark.timeout(1600)
def test_a_large_pipeline_compiles_as_planned(tmp_path):
    """Memory of a v5p within a tenth; what stages send exactly."""
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (extra [plan])")
    mesh = ("--execution.mesh.stage", "4", "--execution.mesh.data", "16")
    batch = ("--training.batch_size", "128", "--training.accumulation", "8")
    topology = ("--topology", "tpu:v5p:4x4x4", "--execution.remat", "full")
    done = command("qwen3_30b_a3b", *topology, *mesh, *batch, "--run.directory", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    compiled = summary["compiled"]
    assert summary["arguments"] == compiled["arguments"]
    assert summary["temporaries"] == pytest.approx(compiled["temporaries"], rel=0.1)
    sent = {one["kind"]: one for one in compiled["traffic"] if one["axes"] == ["stage"]}
    # Eleven ticks with F and eleven with B; a sequence of 4096 tokens of width 2048 in bfloat16.
    assert sent["collective-permute"]["wire_bytes"] == 22 * 4096 * 2048 * 2


@pytest.mark.large
@pytest.mark.timeout(1600)
def test_a_step_for_an_h100_moves_and_keeps_little(tmp_path):
    """OLMoE's width with 4 layers, 4 x 4096 tokens, AdamW; one H100 took 111 ms a step."""
    reason = "compiling for an H100 needs the CUDA plugin (extra [cuda])"
    pytest.importorskip("jax_cuda13_plugin", reason=reason)
    argv = ("olmoe_1b_7b", "--topology", "gpu:h100:1", "--model.num_layers", "4")
    argv += ("--training.batch_size", "4", "--training.sequence_length", "4096")
    argv += ("--training.accumulation", "1", "--execution.remat", "none")
    done = command(*argv, "--run.directory", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # nothing of the compiler's
    compiled = json.loads((tmp_path / "summary.json").read_text())["compiled"]
    assert compiled["expected_results"] == compiled["results"]
    assert compiled["temporaries"] < 20e9
    prediction = predict_by_kernels(compiled, {}, CHIPS["h100"])
    assert prediction is not None
    assert moved_outside(prediction.rows) < 135e9
    assert prediction.step == pytest.approx(0.111, rel=0.1)
