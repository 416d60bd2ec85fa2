# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.report` on runs that are finished, going on, old, empty, or not there."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib

import numpy as np
import pytest

from experiments import report
from experiments.cli.flags import ExitCode
from jaxmoe.models.config import MoEConfig
from jaxmoe.run.config import PretrainConfig, RunConfig, TrainingConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporting.compare import shortest_names
from jaxmoe.tracking import LOSS, JsonlTracker, RouterLoadRecorder
from jaxmoe.tracking.tracker import TRAINED_SECONDS, TRAINED_TOKENS

STEPS = 30


def make_run(path: pathlib.Path, *, top_k: int = 2, status: str | None = "done", old=False):
    """A run's files, as pretrain leaves them, without training."""
    base = PretrainConfig()
    moe = dataclasses.replace(base.model.moe or MoEConfig(), top_k=top_k)
    config = dataclasses.replace(
        base,
        run=RunConfig(directory=str(path)),
        model=dataclasses.replace(base.model, moe=moe),
        training=TrainingConfig(steps=STEPS, batch_size=4, sequence_length=16),
    )
    directory = RunDirectory(path)
    directory.acquire()
    directory.check_config(config)
    tracker = JsonlTracker(directory.metrics_file)
    loads = RouterLoadRecorder(directory.router_file)
    for step in range(1, STEPS + 1):
        values = {LOSS: 5.0 / top_k + 2.0 / step}
        if not old:
            values |= {TRAINED_TOKENS: step * 64.0, TRAINED_SECONDS: step * 0.5 * top_k}
        tracker.log(step, values)
        loads.record(step, np.full((2, 4), step))
    tracker.close()
    loads.save()
    if status is not None:
        summary = {"status": status, "steps": STEPS, "tokens": STEPS * 64, "bytes_per_token": 1.0}
        directory.write_summary(summary | {"final_loss": values[LOSS]})
    directory.release()
    return path


def refused(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        report.main(arguments)
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    return capsys.readouterr().err


def test_two_runs_on_one_page(tmp_path, capsys):
    paths = [str(make_run(tmp_path / name, top_k=k)) for name, k in (("a", 1), ("b", 2))]
    out = tmp_path / "out"
    assert report.main([*paths, "--run.directory", str(out)]) == ExitCode.DONE
    assert f"see {out / 'report.html'}" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert "a against b" in page and "model.moe.top_k" in page and page.count("<svg") == 4
    assert "run.directory" not in page  # differs always
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["differing_fields"]) == {"model.moe.top_k"}
    assert summary["differing_fields"]["model.moe.top_k"] == ["1", "2"]
    assert set(summary["runs"]) == {"a", "b"}
    # FLOPs come from the config where summary.json has none.
    flops = [summary["runs"][name]["model_flops_per_token"] for name in "ab"]
    assert 0 < flops[0] < flops[1]
    equal = summary["training_bits_at_equal"]
    assert equal["tokens"]["budget"] == STEPS * 64 and equal["tokens"]["a"] > equal["tokens"]["b"]
    assert equal["time"]["budget"] == STEPS * 0.5
    assert equal["FLOPs"]["budget"] == pytest.approx(STEPS * 64 * flops[0])
    assert summary["notes"] == []


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([{"eval_bits_per_token": 3.0}, {"eval_bits_per_token": 2.0}], "b"),
        ([{"eval_bits_per_token": 1.0}, {"eval_bits_per_byte": 2.0}], "b"),
        ([{}, {}], "a"),
    ],
)
def test_the_run_with_the_lowest_loss_follows(losses, best, tmp_path, capsys):
    paths = [make_run(tmp_path / name) for name in "ab"]
    for path, loss in zip(paths, losses, strict=True):
        directory = RunDirectory(path)
        directory.write_summary({**(directory.summary() or {}), **loss})
    report.main([*map(str, paths), "--run.directory", str(tmp_path / "out")])
    assert f"next: jaxmoe evaluate {tmp_path / best}\n" in capsys.readouterr().err


def test_flags_may_stand_anywhere(tmp_path):
    a, b, out = (str(tmp_path / name) for name in "abo")
    assert report.split_words([a, "--run.directory", out, b]) == ([a, b], ["--run.directory", out])
    assert report.split_words([f"--run.directory={out}", a]) == ([a], [f"--run.directory={out}"])
    assert report.split_words(["--help", a]) == ([a], ["--help"])


def test_runs_that_go_on_or_are_old_have_notes(tmp_path, capsys):
    going = make_run(tmp_path / "going", status=None)
    broken = make_run(tmp_path / "stopped", status="interrupted")
    old = make_run(tmp_path / "old", old=True)
    out = ["--run.directory", str(tmp_path / "out")]
    assert report.main([str(going), str(broken), str(old), *out]) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert f"{going} has not ended: step {STEPS} of {STEPS}, numbers so far" in printed
    assert f"{broken} ended early: interrupted at step {STEPS}" in printed
    assert f"{old} was written by a version that did not record tokens" in printed
    page = (tmp_path / "out" / "report.html").read_text()
    assert "unfinished" in page and "Not known by time: old." in page


def test_one_run_alone_has_its_own_page_drawn_anew(tmp_path, capsys):
    path = make_run(tmp_path / "alone")
    before = (path / "summary.json").read_bytes()
    assert report.main([str(path)]) == ExitCode.DONE
    assert f"see {path / 'report.html'}" in capsys.readouterr().out
    assert "jaxmoe: alone" in (path / "report.html").read_text()
    assert (path / "plots" / "loss.png").exists()
    assert (path / "summary.json").read_bytes() == before


def test_runs_of_one_name_are_told_apart(tmp_path, capsys):
    paths = [str(tmp_path / name / "tiny") for name in ("x", "y")]
    assert shortest_names(paths) == ["x/tiny", "y/tiny"]
    assert shortest_names(["/a/b", "/a/c"]) == ["b", "c"]
    path = str(make_run(tmp_path / "same"))
    assert "a run is named twice" in refused([path, path], capsys)


def test_what_is_no_run_is_refused_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run is the default
    assert "no run is given: name run directories" in refused([], capsys)
    missing = tmp_path / "missing"
    assert f"there is no model '{missing}'" in refused([str(missing)], capsys)
    missing.mkdir()
    assert "holds no run (config.json is missing)" in refused([str(missing)], capsys)
    empty = make_run(tmp_path / "empty")
    (empty / "metrics.jsonl").write_text("")
    assert "has no steps yet (metrics.jsonl)" in refused([str(empty)], capsys)
    damaged = make_run(tmp_path / "damaged")
    (damaged / "summary.json").write_text("{")
    assert "is not JSON" in refused([str(damaged)], capsys)


def test_a_run_is_not_written_over(tmp_path, capsys):
    path = make_run(tmp_path / "run")
    text = refused([str(path), "--run.directory", str(path)], capsys)
    assert "holds a run, whose summary.json would be lost" in text
    # One run, somewhere else: a comparison of one.
    out = tmp_path / "out"
    assert report.main([str(path), "--run.directory", str(out)]) == ExitCode.DONE
    assert set(json.loads((out / "summary.json").read_text())["runs"]) == {"run"}


def test_a_config_of_another_version_costs_only_the_flops(tmp_path, capsys):
    paths = [make_run(tmp_path / name) for name in "ab"]
    config = json.loads((paths[0] / "config.json").read_text())
    config["gone"] = 1
    (paths[0] / "config.json").write_text(json.dumps(config))
    arguments = [*map(str, paths), "--run.directory", str(tmp_path / "out")]
    assert report.main(arguments) == ExitCode.DONE
    assert "a: its config is of another version, FLOPs are not known" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, capsys, monkeypatch):
    paths = [str(make_run(tmp_path / name)) for name in ("a", "b")]
    replace = os.replace

    def refuse(source, target):
        if "report" in str(target) or "plots" in str(target):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    out = tmp_path / "out"
    for arguments, directory in (
        (paths[:1], paths[0]),
        ([*paths, "--run.directory", str(out)], out),
    ):
        error = refused(arguments, capsys)
        assert error.startswith(f"error: run.directory={directory} is not writable: change its")
        assert error.count("\n") == 1
