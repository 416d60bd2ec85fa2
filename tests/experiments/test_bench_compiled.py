# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`bench compiled`: the table, refusals, and the protocol of the process of the peer."""

from __future__ import annotations

import json
import re
import sys

import pytest

from experiments.bench import __main__ as bench
from experiments.bench import compiled, maxtext_step


@pytest.mark.slow
def test_program_of_this_library_is_compiled(tmp_path, capsys):
    argv = ["compiled", "--recipe", "languages", "--topology", "cpu:8", "--peer", "none"]
    argv += ["--expert", "2"]
    assert bench.main([*argv, "--run.directory", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    program = summary["programs"]["jaxmoe"]
    kinds = {line["kind"] for line in program["traffic"]}
    assert kinds and program["temporaries"] > 0 and program["bytes_accessed"] > 0
    page = capsys.readouterr().out
    assert "languages on cpu:8" in page and all(f"{kind}, sent" in page for kind in kinds)


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--recipe", "tiny"), "is no model of MaxText"),
        (("--recipe", "tny"), "must be one of"),
        (("--topology", "cpu:8"), "must be of TPUs for --peer maxtext"),
        (("--sequences", "0"), "must be at least 1"),
        (("--expert", "3"), "expert=3 must divide the 256 devices"),
    ],
)
def test_refusals(capsys, argv, message):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["compiled", *argv])
    assert message in " ".join(capsys.readouterr().err.split())


def test_missing_peer_is_refused_before_anything_is_compiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compiled, "check_compiler", lambda topology: None)
    monkeypatch.setattr(compiled, "in_child", None)
    monkeypatch.setattr(compiled, "_version", lambda field, python, package: "")
    with pytest.raises(SystemExit, match="2"):
        bench.main(["compiled", "--run.directory", str(tmp_path)])
    error = " ".join(capsys.readouterr().err.split())
    assert "has no maxtext: give a Python that has MaxText and libtpu" in error


@pytest.mark.parametrize("field", ["python", "peer_python"])
def test_a_python_that_cannot_run_is_refused(tmp_path, capsys, monkeypatch, field):
    monkeypatch.setattr(compiled, "check_compiler", lambda topology: None)
    monkeypatch.setattr(compiled, "in_child", None)
    argv = ["compiled", "--run.directory", str(tmp_path / "run"), f"--{field}", str(tmp_path)]
    with pytest.raises(SystemExit, match="2"):
        bench.main(argv)
    assert f"{field}={tmp_path} is no Python that can be run" in capsys.readouterr().err


PROGRAM = {
    "kind": "CompiledStep",
    "seconds": 5.0,
    "arguments": 10,
    "temporaries": 20,
    "allocated": None,
    "peak": 25,
    "flops": 3.0,
    "bytes_accessed": 4.0,
    "traffic": None,
    "work": {
        "product_flops": 6e9,
        "kernel_flops": 0.0,
        "bytes_accessed": 7.0,
        "unestimated": 2,
    },
}


def test_a_step_that_does_not_fit_is_shown_beside_one_that_does(tmp_path, capsys, monkeypatch):
    """Also: what the peer was called with is kept, and its refusal is an error of the command."""
    no = {"kind": "DoesNotFit", "needed": 3 * 10**9, "available": 10**9, "text": "Used 3G of 1G"}
    answers = {"experiments.plan.child": no, "experiments.bench.maxtext_step": PROGRAM}
    monkeypatch.setattr(compiled, "check_compiler", lambda topology: None)
    monkeypatch.setattr(compiled, "in_child", lambda module, *rest, **named: answers[module])
    monkeypatch.setattr(compiled, "_version", lambda field, python, package: "1.0")
    assert bench.main(["compiled", "--run.directory", str(tmp_path / "run")]) == 0
    page = capsys.readouterr().out.splitlines()
    rows = {name: values for name, *values in (re.split(r"\s{2,}", line) for line in page)}
    assert rows["does not fit, needs"] == ["3.00 GB", "-"]
    assert rows["arguments"] == ["-", "10 B"]
    assert rows["FLOPs of products, loops counted"] == ["-", "6e+09"]
    assert rows["kernels without an estimate"] == ["-", "2"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "compile_topology=v5e-256" in summary["programs"]["maxtext"]["words"]
    answers["experiments.bench.maxtext_step"] = {"refused": "MaxText has no v5e-256"}
    with pytest.raises(SystemExit, match="2"):
        bench.main(["compiled", "--run.directory", str(tmp_path / "other")])
    assert "MaxText has no v5e-256" in capsys.readouterr().err


PEER = """
import types
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P

def jit_and_compile(function, inputs, keywords, mesh, *more):
    return jax.jit(function).lower(*inputs).compile()

accelerator_to_spec_map = types.SimpleNamespace(
    UserFacingNameToSystemCharacteristics={
        "v5e-8": types.SimpleNamespace(topology_name="v5e:2x4")
    }
)

def main(words):
    assert words[1].endswith("configs/base.yml"), words
    assert words[2] == "compile_topology=v5e-8", words
    if "model_name=huge" in words:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 3.00G of 2.00G hbm")
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    total = jax.shard_map(lambda x: jax.lax.psum(x, "fsdp"), mesh=mesh, in_specs=P("fsdp"),
                          out_specs=P())
    jit_and_compile(total, (np.ones(64, np.float32),), {}, mesh, None)
"""


@pytest.fixture
def maxtext(tmp_path, monkeypatch):
    """A module with the names of MaxText's `train_compile` that are used, and one all-reduce.

    Returns:
        (words of its command line, shape) -> result of the job.
    """
    folder = tmp_path / "maxtext" / "trainers" / "pre_train"
    folder.mkdir(parents=True)
    (folder / "train_compile.py").write_text(PEER)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "job.json"

    def run(*words, shape="2x4"):
        file.write_text(json.dumps({"words": words, "shape": shape}))
        assert maxtext_step.main([str(file)]) == 0
        assert (tmp_path / "job.json.phase").read_text()
        return json.loads((tmp_path / "job.json.result").read_text())

    yield run
    for name in [name for name in sys.modules if name.partition(".")[0] == "maxtext"]:
        monkeypatch.delitem(sys.modules, name)


def test_program_of_the_peer_is_read_behind_its_own_command(maxtext):
    result = maxtext("compile_topology=v5e-8", "model_name=x")
    (line,) = result["traffic"]
    assert (line["kind"], line["axes"], line["result_bytes"]) == ("all-reduce", ["fsdp"], 32)
    assert result["kind"] == "CompiledProgram"
    assert result["seconds"] > 0 and result["arguments"] > 0


def test_a_peer_out_of_memory_is_a_result(maxtext):
    result = maxtext("compile_topology=v5e-8", "model_name=huge")
    assert (result["kind"], result["needed"], result["available"]) == (
        "DoesNotFit",
        3 * 2**30,
        2 * 2**30,
    )


def test_topologies_of_the_peer(maxtext):
    found = maxtext("compile_topology=v5e-8", shape="4x2")
    assert "MaxText's v5e-8 has the shape 2x4, not 4x2" in found["refused"]
    assert "MaxText has no v5e-9; it has v5e-8" in maxtext("compile_topology=v5e-9")["refused"]
