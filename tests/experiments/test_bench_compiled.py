# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`bench compiled`: the table, refusals, and the protocol of the process of the peer."""

from __future__ import annotations

import json
import sys

import pytest

from experiments.bench import __main__ as bench
from experiments.bench import compiled, maxtext_step


@pytest.mark.slow
def test_program_of_this_library_is_compiled(tmp_path, capsys):
    argv = ["compiled", "--recipe", "languages", "--topology", "cpu:8", "--peer", "none"]
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
    ],
)
def test_refusals(capsys, argv, message):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["compiled", *argv])
    assert message in " ".join(capsys.readouterr().err.split())


def test_missing_peer_is_refused_before_anything_is_compiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compiled, "check_compiler", lambda topology: None)
    monkeypatch.setattr(compiled, "in_child", None)
    monkeypatch.setattr(compiled, "_version", lambda python, package: "")
    with pytest.raises(SystemExit, match="2"):
        bench.main(["compiled", "--run.directory", str(tmp_path)])
    assert "has no MaxText: give a Python that has it" in " ".join(capsys.readouterr().err.split())


PEER = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P

def jit_and_compile(function, inputs, keywords, mesh, *more):
    return jax.jit(function).lower(*inputs).compile()

def main(words):
    assert words[1].endswith("configs/base.yml") and words[2:] == ["model_name=x"], words
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    total = jax.shard_map(lambda x: jax.lax.psum(x, "fsdp"), mesh=mesh, in_specs=P("fsdp"),
                          out_specs=P())
    jit_and_compile(total, (np.ones(64, np.float32),), {}, mesh, None)
"""


def test_program_of_the_peer_is_read_behind_its_own_command(tmp_path, monkeypatch):
    """A module with the two functions of MaxText's `train_compile`, and one all-reduce."""
    folder = tmp_path / "maxtext" / "trainers" / "pre_train"
    folder.mkdir(parents=True)
    (folder / "train_compile.py").write_text(PEER)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"words": ["model_name=x"]}))
    assert maxtext_step.main([str(file)]) == 0
    result = json.loads((tmp_path / "job.json.result").read_text())
    (line,) = result["traffic"]
    assert (line["kind"], line["axes"], line["result_bytes"]) == ("all-reduce", ["fsdp"], 32)
    assert result["seconds"] > 0 and result["arguments"] > 0
    for name in [name for name in sys.modules if name.partition(".")[0] == "maxtext"]:
        monkeypatch.delitem(sys.modules, name)
