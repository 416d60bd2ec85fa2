# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Stragglers, differing workers and goodput in real runs."""

import json
import math
import time

import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.contrib.survival.links.faults import LinkRule
from jaxmoe.contrib.survival.links.watch import SLOWEST
from jaxmoe.resilience.goodput import Ledger, account, read_ledger
from jaxmoe.run.reporter import Reporter
from jaxmoe.training.parts.worker_losses import LOSS_RANGE, LOSS_STD
from tests.support.ports import free_port
from tests.support.runs import flags, start_run

CLEAN, STEPS = 40, 94
# After the clean steps process 1 sleeps before each for 0.2 s, or for five steps where they take
# longer (a device that still computes hides what its host does meanwhile, and a machine may get
# slower), and what its last device learns from is not what follows.
FAULTY = f"""
import os, sys, time
import jax, numpy as np
from experiments import pretrain
from jaxmoe.training.feed import LoaderFeed
from sharding.distributed import global_batch

def batches(self, first_step):
    index, count = jax.process_index(), jax.process_count()
    rows = self.loader.iterate(first_step, {STEPS}, process_index=index, process_count=count)
    for step, batch in enumerate(rows, first_step):
        if step == 10:
            began = time.perf_counter()
        if step == {CLEAN}:
            nap = max(0.2, 5 * (time.perf_counter() - began) / ({CLEAN} - 10))
        if step >= {CLEAN} and index == 1:
            time.sleep(nap)
            half = len(batch.targets) // 2
            targets = np.array(batch.targets)
            targets[half:] = (targets[half:] + 3) % self.loader.source.vocab_size
            batch = batch.replace(targets=targets)
        yield global_batch(batch, self.mesh)

LoaderFeed.batches = batches
sys.exit(pretrain.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_straggler_and_corrupt_device_are_named(tmp_path, monkeypatch):
    """Both are named within 50 steps, with process and device, and no other."""
    directory = tmp_path / "run"
    more = ("--execution.mesh.data", "4", "--training.batch_size", "32", "--evaluation.every", "0")
    more += (
        "--checkpoint.every",
        "0",
        "--tracking.print_every",
        "10",
        "--tracking.sample_length",
        "0",
    )
    address = f"127.0.0.1:{free_port()}"
    running = []
    try:
        for index in range(2):
            monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
            monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
            monkeypatch.setenv("JAX_PROCESS_ID", str(index))
            running.append(start_run(flags(directory, STEPS, *more), FAULTY, devices=2))
        printed = [process.communicate(timeout=840)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [ExitCode.DONE] * 2, "\n".join(printed)
    summary = json.loads((directory / "summary.json").read_text())
    late, wrong = sorted(summary["warnings"], key=lambda text: "worker" in text)
    for text in (late, wrong):
        step = int(text.removeprefix("step ").partition(":")[0])
        assert CLEAN < step <= CLEAN + 50, text
        assert text.partition(": ")[2] in printed[0]
    assert ": process 1 is late: " in late and late.endswith("most of it in waiting for data")
    assert ": worker 3 of 4 (devices " in wrong
    assert "; process 1) differs from the others: its loss by +" in wrong
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for name, times in ((LOSS_STD, STEPS), (LOSS_RANGE, STEPS)):
        values = [record[name] for record in records if name in record]
        assert len(values) == times and all(math.isfinite(value) for value in values)


# From the second probe on, process 1 sleeps before each of its messages; its neighbours do not.
SLEEPING = """
import sys, time
import jax
from experiments import pretrain
from jaxmoe.contrib.survival.links.probe import LinkProbe

measure, send, probes = LinkProbe.measure, LinkProbe.send, [0]

def counted(self):
    probes[0] += 1
    if probes[0] == 1 and jax.process_index() == 0:
        print("devices", [device.process_index for device in self.mesh.devices.flat])
    return measure(self)

def late(self, run):
    if probes[0] > 1 and jax.process_index() == 1:
        time.sleep(0.1)
    return send(self, run)

LinkProbe.measure, LinkProbe.send = counted, late
sys.exit(pretrain.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_sleeping_process_is_named_by_its_links(tmp_path, monkeypatch):
    """In log, metrics, summary and report; nothing before it sleeps, and nothing else."""
    directory = tmp_path / "run"
    more = ("--execution.mesh.data", "4", "--link_measurements.every", "2")
    more = (
        *more,
        "--tracking.sample_length",
        "0",
        "--tracking.print_every",
        "100",
        "--checkpoint.every",
        "0",
    )
    more = (*more, "--processes.order", "1", "0")
    address, running = f"127.0.0.1:{free_port()}", []
    try:
        for index in range(2):
            monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
            monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
            monkeypatch.setenv("JAX_PROCESS_ID", str(index))
            running.append(start_run(flags(directory, 8, *more), SLEEPING, devices=2))
        printed = [process.communicate(timeout=840)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [ExitCode.DONE] * 2, "\n".join(printed)
    assert "devices [1, 1, 0, 0]" in printed[0], "the order of hosts"
    (text,) = json.loads((directory / "summary.json").read_text())["warnings"]
    step, _, words = text.removeprefix("step ").partition(": ")
    assert int(step) == 6, text
    assert words.startswith("process 1 is slow: it takes ") and words.endswith("--exclude 1")
    assert words in printed[0] and "process 1 is slow" in (directory / "report.html").read_text()
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    slowest = {record["step"]: record[SLOWEST] for record in records if SLOWEST in record}
    assert list(slowest) == [2, 4, 6, 8]
    assert min(slowest[step] for step in (4, 6, 8)) > LinkRule().large


class Killed(BaseException):
    """Ends a start at any point, as SIGKILL does, while the process continues."""


@pytest.mark.slow
def test_goodput_of_killed_and_resumed_run_is_its_wall_time(tmp_path, monkeypatch, capsys):
    """Within 3% of an independent clock, which runs before the first record too."""
    directory, trained, record = tmp_path / "run", Reporter.log_steps, Ledger.record
    recorded = []

    def record_and_look(self, *arguments, **more):
        recorded.append(time.monotonic())
        record(self, *arguments, **more)

    def trained_and_killed(self, report):
        trained(self, report)
        if report.steps[-1] >= 28:
            while not (directory / "checkpoints" / "20").exists():
                time.sleep(0.01)
            raise Killed

    more = ("--checkpoint.every", "20", "--tracking.print_every", "4", "--evaluation.every", "10")
    command = flags(directory, 40, *more, "--tracking.sample_length", "0")
    monkeypatch.setattr(Ledger, "record", record_and_look)
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "log_steps", trained_and_killed)
        with pytest.raises(Killed):
            pretrain.main(command)
    time.sleep(1.0)
    assert pretrain.main(command) == ExitCode.DONE
    wall = recorded[-1] - began
    books = account(read_ledger(directory / "goodput.jsonl"))
    assert books.wall_seconds == pytest.approx(wall, rel=0.03)
    assert books.starts == 2 and books.lost_steps == 4, "as of the last record of the first start"
    seconds = books.seconds
    assert 1.0 <= seconds["down"] and seconds["lost"] > 0.0
    rows = ("train", "data", "evaluate", "checkpoint", "start", "restore", "compile", "finish")
    assert all(seconds[row] > 0.0 for row in rows)
    summary = json.loads((directory / "summary.json").read_text())["goodput"]
    assert summary["lost_steps"] == 4 and sum(summary["seconds"].values()) == pytest.approx(
        summary["wall_seconds"]
    )
    assert "in 2 starts, 4 steps lost: " in capsys.readouterr().out
    assert "Time of all starts" in (directory / "report.html").read_text()
