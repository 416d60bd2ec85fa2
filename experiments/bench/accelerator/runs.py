# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The main command on the device and on the CPU: first step, losses, a checkpoint of the other."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

from experiments.bench.accelerator.work import FAILURES, BenchWork, emit, emit_failure, run_part

STEPS = 20
MORE = 4
_COMPILED = re.compile(r"compiled in ([0-9.]+) s")


def runs(work: BenchWork) -> None:
    """Emit a row for the run on this device; beside others also for the CPU, and for resuming."""
    place = pathlib.Path(str(work.options["place"]))
    platform = "cpu" if work.is_tiny else "device"
    phase = "alone, cache filled" if work.is_measured else "beside others, cache empty"
    row: dict[str, Any] = {"case": f"pretrain tiny, {phase}", "name": platform}
    try:
        losses = _select_trained(row, place / f"{platform}-{work.phase}", platform)
    except FAILURES as error:
        emit_failure(error, **row)
        return
    emit(**row)
    if work.is_measured:
        return
    row = {"case": "losses beside the CPU's", "name": platform}
    try:
        cpu_run = _select_trained(row, place / "beside", "cpu")
        distances = [abs(x - y) / abs(y) for x, y in zip(losses, cpu_run, strict=True)]
        row |= {"losses": losses, "losses_of_cpu": cpu_run, "largest_distance": max(distances)}
        row["first_distance"] = distances[0]
    except FAILURES as error:
        emit_failure(error, **row)
    else:
        emit(**row)
    row = {"case": "a checkpoint of the device goes on on the CPU", "name": platform}
    try:
        directory = place / f"{platform}-{work.phase}"
        more = ["resume", str(directory), "--training.steps", str(STEPS + MORE)]
        row["losses"] = _command(row, more, directory, "cpu")[STEPS:]
        assert len(row["losses"]) == MORE, "the run did not go on"
    except FAILURES as error:
        emit_failure(error, **row)
    else:
        emit(**row)


def _select_trained(row: dict[str, Any], directory: pathlib.Path, device: str) -> list[float]:
    """Train for a few steps, and return the losses."""
    short = ["--checkpoint.every", str(STEPS // 2), "--evaluation.batches", "1"]
    arguments = ["tiny", "--training.steps", str(STEPS), "--run.directory", str(directory), *short]
    arguments += ["--tracking.sample_length", "0"]
    return _command(row, arguments, directory, device)


def _command(
    row: dict[str, Any], arguments: list[str], directory: pathlib.Path, device: str
) -> list[float]:
    environment = dict(os.environ)
    if device == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    started = time.monotonic()
    text = []
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "experiments.pretrain", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:  # with its time, for a part that is stopped
            sys.stderr.write(f"{time.monotonic() - started:6.1f} {line}")
            sys.stderr.flush()
            text.append(line)
    row["seconds"] = round(time.monotonic() - started, 1)
    match = _COMPILED.search("".join(text))
    row["compile_seconds"] = float(match[1]) if match else None
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {' '.join(text[-1:]).strip()}")
    row["first_step_seconds"] = _seconds_to_the_first_step(directory)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    losses = [record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record]
    return [round(loss, 5) for loss in losses]


def _seconds_to_the_first_step(directory: pathlib.Path) -> float:
    """Return the seconds from the start of the last process to the end of its first step."""
    last = json.loads((directory / "goodput.jsonl").read_text().splitlines()[-1])
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    first = next(record for record in records if record["step"] == last["first_step"] + 1)
    before = last["seconds"].get("start", 0.0) + last["seconds"].get("compile", 0.0)
    return round(before + first["progress/seconds"], 1)


if __name__ == "__main__":
    run_part(runs)
