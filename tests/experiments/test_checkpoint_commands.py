# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.checkpoint` verify, inspect and reshard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.checkpoint import inspect as checkpoint_inspect
from experiments.checkpoint import resharding as checkpoint_reshard
from experiments.checkpoint import verify as checkpoint_verify
from experiments.cli.flags import ExitCode
from jaxmoe.checkpoint import load_checkpoint, save_checkpoint

WEIGHT = np.arange(24, dtype=np.float32).reshape(6, 4)


@pytest.fixture
def run(tmp_path):
    """Steps 1 and 2 of a run directory."""
    state = {
        "params": {"head": {"weight": WEIGHT}},
        "opt_state": {"count": np.int32(3)},
        "rng": jax.random.key(1),
    }
    for step in (1, 2):
        save_checkpoint(tmp_path / "run" / "checkpoints", state, step=step, config={"a": 1})
    return tmp_path / "run"


def _refused(main, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    return capsys.readouterr().err


def test_verify_command_reports_damage(run, capsys):
    assert checkpoint_verify.main(["--run.directory", str(run)]) == ExitCode.DONE
    assert capsys.readouterr().out == "1: whole, 3 arrays\n2: whole, 3 arrays\n"
    files = [p for p in (run / "checkpoints" / "1" / "state").rglob("*") if p.is_file()]
    file = max(files, key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    where = ["--run.directory", str(run / "checkpoints")]
    for level in ("files", "full"):
        assert checkpoint_verify.main([*where, "--level", level]) == ExitCode.DAMAGED
        out = capsys.readouterr().out.splitlines()
        assert out[0].startswith(f"1: {run}/checkpoints/1 is damaged: state/")
        assert out[1].startswith("2: whole, 3 arrays")
    assert checkpoint_verify.main([*where, "--run.step", "2"]) == ExitCode.DONE
    text = _refused(checkpoint_verify.main, [*where, "--run.step", "3"], capsys)
    assert "run.step=3: run.directory=" in text and "has the steps 1, 2" in text
    text = _refused(checkpoint_verify.main, ["--run.directory", str(run / "none")], capsys)
    assert "the directory does not exist" in text


def test_inspect_command_lists_contents(run, capsys):
    assert checkpoint_inspect.main(["--run.directory", str(run)]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}/checkpoints: steps 1, 2"
    (row,) = [line.split() for line in lines if line.startswith("params/head/weight")]
    assert row[1:4] == ["6x4", "float32", "96"] and len(row[-1]) == 16
    assert "step 2, schema 2: 3 arrays, " in lines[-2]


def test_reshard_keeps_parameters_alone_in_another_dtype(run, tmp_path, capsys):
    arguments = ["--run.directory", str(run), "--to", str(tmp_path / "new"), "--keep", "params"]
    assert checkpoint_reshard.main([*arguments, "--dtype", "bfloat16"]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith(f"{tmp_path}/new/2: 1 arrays, ")
    tree = load_checkpoint(tmp_path / "new")
    assert tree.keys() == {"params"}
    np.testing.assert_array_equal(tree["params"]["head"]["weight"], WEIGHT.astype(jnp.bfloat16))
    text = _refused(checkpoint_reshard.main, arguments, capsys)
    assert "already has a checkpoint of step 2" in text
    assert "needs --to DIR" in _refused(checkpoint_reshard.main, arguments[:2], capsys)


def test_reshard_by_a_mapping(run, tmp_path, capsys):
    names = tmp_path / "names.py"
    head = (
        "from jaxmoe.checkpoint.mapping import *\nout = Rename('params/head/weight', 'model/out')\n"
    )
    names.write_text(f"{head}RULES = [out, Drop('{{rest...}}')]\n")
    arguments = ["--run.directory", str(run), "--to", str(tmp_path / "new")]
    mapped = [*arguments, "--mapping", str(names)]
    assert "params/head/weight: matches" in _refused(checkpoint_reshard.main, mapped, capsys)
    names.write_text(f"{head}RULES = [out, Drop('opt_state/{{x}}'), Rename('rng', 'rng')]\n")
    assert checkpoint_reshard.main(mapped) == ExitCode.DONE
    tree = load_checkpoint(tmp_path / "new")
    np.testing.assert_array_equal(tree["model"]["out"], WEIGHT)
    assert jax.random.key_data(tree["rng"]).tolist() == [0, 1]
    mapped[-1] = str(tmp_path / "none")
    assert "cannot be read (No such file" in _refused(checkpoint_reshard.main, mapped, capsys)
