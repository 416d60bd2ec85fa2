# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.place`: a run written with its experts placed computes the same."""

import dataclasses
import json
import pathlib
import re
import shlex

import jax
import numpy as np
import pytest

from experiments import place, pretrain
from experiments.doctor.devices import tiny_config
from jaxmoe.checkpoint import save_checkpoint
from jaxmoe.routing.telemetry.trace import save_trace
from jaxmoe.run.assemble import assemble
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.tracking import read_metrics
from jaxmoe.training.evaluate import evaluate, make_eval_step
from tests.support.runs import SMALL, flags
from tests.support.source_tree import PACKAGES, ROOT
from tests.support.tolerances import assert_close
from tests.support.traces import planted


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A run directory with the state before the first step, which trains nothing."""
    path = tmp_path_factory.mktemp("place") / "run"
    config = tiny_config(len(jax.devices()))
    model = dataclasses.replace(config.model, num_layers=2)
    config = dataclasses.replace(config, model=model)
    assembly = assemble(config)
    directory = RunDirectory(path)
    directory.acquire()
    directory.check_config(config)
    save_checkpoint(
        directory.checkpoints_directory,
        assembly.new_state(),
        step=0,
        config=config,
        data=assembly.loader.position(0),
    )
    directory.release()
    return path


def held_out(path):
    assembly, state, _ = load_run(str(path), None)
    with jax.set_mesh(assembly.mesh):
        step = make_eval_step(assembly.plan.model, execution=assembly.execution)
        result = evaluate(step, state.params, state.router_state, assembly.held_out())
    return result.nats_per_token, state


@pytest.mark.large
def test_a_placed_run_computes_the_same(untrained, tmp_path, capsys):
    into = tmp_path / "placed"
    arguments = ["--run.directory", str(untrained), "--devices", "2", "--into", str(into)]
    assert place.main([*arguments, "placer:expert_grouping"]) == 0
    words = capsys.readouterr().out
    assert all(name in words for name in ("identity", "random", "exflow", "moetuner"))
    (before, old), (after, new) = held_out(untrained), held_out(into)
    assert_close(np.float64(after), np.float64(before), "matmul")
    with np.load(into / "placement.npz") as file:
        placement = place.ExpertPlacement(file["device_of"], int(file["num_devices"]))
    expected = place.relocate(assemble_model(untrained), old, placement)
    jax.tree.map(np.testing.assert_array_equal, new.params, expected.params)
    with pytest.raises(SystemExit) as stopped:
        place.main(arguments)
    assert stopped.value.code == 2 and "exists: choose a new" in capsys.readouterr().err


def assemble_model(path):
    return load_run(str(path), None)[0].plan.model


def test_a_trace_alone_is_compared(tmp_path, capsys):
    save_trace(tmp_path / "trace.npz", planted(0, num_layers=2, num_experts=8, num_tokens=256))
    assert place.main(["--trace", str(tmp_path / "trace.npz"), "--devices", "4"]) == 0
    assert capsys.readouterr().out.count("%") == 10
    for more, message in (
        (["--devices", "0"], "devices=0 must be at least 1"),
        (["--devices", "3"], "3 devices cannot hold equal parts of 8 experts"),
        (["--into", "x"], "a trace alone has no run"),
    ):
        with pytest.raises(SystemExit) as stopped:
            place.main(["--trace", str(tmp_path / "trace.npz"), *more])
        assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--trace", "trace.npz", "--tables", "x"], "tables need the vocabulary of run.directory"),
        (["--tables", "taken"], "tables=taken exists: choose a new file"),
        (["--tables", "taken/x"], "tables=taken/x cannot be made"),
        (["--into", "taken/x"], "into=taken/x cannot be made"),
    ],
)
def test_tables_that_cannot_be_written_are_refused(more, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("taken").touch()
    with pytest.raises(SystemExit) as stopped:
        place.main(more)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def documented(text=place.__doc__):
    """Commands in a text, in order, as (module, flags); in the docstring of `place` by default."""
    text = re.sub(r"\\\n\s+", "", text)
    lines = re.findall(r"^ *jaxmoe (\w+) (.+)$", text, re.MULTILINE)
    return [(name, shlex.split(words)) for name, words in lines]


def test_pages_show_the_commands_of_the_docstring():
    """Those that `test_documented_commands_run` runs."""
    pages = [ROOT / "README.md", *(ROOT / ".docs").rglob("*.md")]
    pages += [page for package in PACKAGES for page in (ROOT / package).rglob("README.md")]
    shown = [
        (name, words)
        for page in pages
        for name, words in documented(page.read_text(encoding="utf-8"))
        if name == "place" or "--execution.dispatcher.token_tables" in words
    ]
    assert len(shown) >= 3 and all(command in documented() for command in shown)


@pytest.mark.slow
@pytest.mark.trains
def test_documented_commands_run(tmp_path, monkeypatch):
    """As written, with a smaller model in place of the recipe, on 8 devices in place of 4."""
    monkeypatch.chdir(tmp_path)
    assert pretrain.main(flags(pathlib.Path("runs/pretrain/tiny"), 4)) == 0
    trace = planted(0, num_layers=2, num_experts=8, num_tokens=256)
    save_trace("runs/routers/short/traces/mixtral.npz", trace)
    commands = documented()
    assert [name for name, _ in commands] == ["place", "place", "place", "pretrain"]
    for name, words in commands[:-1]:
        assert name == "place" and place.main(words) == 0
    recipe, *words = commands[-1][1]
    data = words.index("--execution.mesh.data") + 1
    assert recipe == "tiny" and words[data] == "1"
    words[data] = "2"
    small = [*SMALL, "--training.steps", "4"]
    assert pretrain.main([*small, *words]) == 0
    run = pathlib.Path("runs/pretrain/moved")
    series = read_metrics(run / "metrics.jsonl")
    for name in ("", "_unmoved"):
        steps, local = series[f"router/local_activation{name}"]
        assert len(steps) == 4 and np.all((local >= 0.0) & (local <= 0.5))  # one expert a device
    summary = json.loads((run / "summary.json").read_text())
    assert summary["router_local_activation"] == pytest.approx(
        series["router/local_activation"][1][-1]
    )
