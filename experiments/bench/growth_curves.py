# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What `bench growth` measures: work by the size of something, each point in its own process.

    python -m experiments.bench.growth_curves files 500 FOLDER prepare
    python -m experiments.bench.growth_curves files 500 FOLDER

The first writes what the second reads, so that its memory is not counted. The second prints one
JSON line: the seconds of the processor that the work took, and the resident memory that came with
it, bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.side import peak_bytes
from experiments.plan import __main__ as plan_command
from jaxmoe.checkpoint.single import load_checkpoint, save_checkpoint
from jaxmoe.data.files import FilesConfig
from jaxmoe.data.text_only import TextOnly
from jaxmoe.data.tokenizer import ByteTokenizer
from jaxmoe.generation.text_stream import TextStream
from jaxmoe.optim.muon import scale_by_muon
from jaxmoe.serve import BATCHING, Facts, Instance, Request, Result, Sampling
from jaxmoe.tracking.charts import line_chart, with_smoothed
from jaxmoe.tracking.history import HistoryRecorder
from jaxmoe.tracking.jsonl import CURVE_LINES, JsonlTracker, read_last_metrics, read_metrics
from jaxmoe.tracking.tracker import LOSS

Work = Callable[[], object]

_FILES_OF_A_FOLDER = 500
_NUMBERS = {f"router/number_{number:02}": 1.0 / (3 + number) for number in range(16)}
_STEPS_OF_A_QUEUE = 50
_STOP_LENGTH = 60_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthCurve:
    """Work whose cost grows with the size of something."""

    what: str
    """What is done, in words."""
    unit: str
    """What the sizes count."""
    sizes: tuple[int, ...]
    """Sizes to measure, rising."""
    begin: Callable[[int, pathlib.Path], Work]
    """Returns the work that is measured, of a size and a folder."""
    prepare: Callable[[int, pathlib.Path], object] = lambda size, folder: None
    """Writes what the work reads."""


def _source(folder: pathlib.Path) -> FilesConfig:
    return FilesConfig(path=(str(folder / "data"),), cache=str(folder / "cache"))


def _write_files(size: int, folder: pathlib.Path) -> None:
    for number in range(size):
        path = folder / "data" / f"{number // _FILES_OF_A_FOLDER:04}" / f"{number:07}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {number} of {size}\n" * 4)
    _source(folder).build()


def _write_text(size: int, folder: pathlib.Path) -> None:
    (folder / "data").mkdir(parents=True)
    words = np.random.default_rng(0).integers(0, 10_000, 2**17)
    line = " ".join(f"word{word}" for word in words)[: 2**20 - 1] + "\n"
    with (folder / "data" / "text.txt").open("w") as file:
        for _ in range(size):
            file.write(line)


def _write_metrics(size: int, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    losses = np.random.default_rng(0).normal(3.0, 0.1, size)
    tracker = JsonlTracker(folder / "metrics.jsonl")
    for number, loss in enumerate(losses.tolist()):
        tracker.log(number + 1, {LOSS: loss} | _NUMBERS)
    tracker.close()


def _resume(size: int, folder: pathlib.Path) -> Work:
    def work() -> None:
        JsonlTracker(folder / "metrics.jsonl", size).close()
        read_last_metrics(folder / "metrics.jsonl")

    return work


def _draw(size: int, folder: pathlib.Path) -> Work:
    del size

    def work() -> None:
        series = read_metrics(folder / "metrics.jsonl", max_lines=CURVE_LINES)
        for name in (LOSS, *_NUMBERS):
            line_chart(with_smoothed(name, *series[name]), y_label=name)

    return work


def _save_loads(size: int, folder: pathlib.Path) -> Work:
    folder.mkdir(parents=True, exist_ok=True)
    recorder = HistoryRecorder(folder / "router.npz")
    load = np.random.default_rng(0).dirichlet(np.ones(size), 16)
    for step in range(1024):
        recorder.add(step, {"load": load})
    return recorder.save


def _save(size: int, folder: pathlib.Path) -> Work:
    state = {"params": {"w": jnp.arange(size * 2**18, dtype=jnp.float32)}}
    return lambda: save_checkpoint(folder / "saved", state, step=1, config={})


def _write_state(size: int, folder: pathlib.Path) -> None:
    _save(size, folder)()


def _restore(size: int, folder: pathlib.Path) -> Work:
    del size
    return lambda: load_checkpoint(folder / "saved")


def _queue(size: int, folder: pathlib.Path) -> Work:
    del folder
    facts = Facts(num_pages=64, page_size=16, max_running=8, max_length=512, max_waiting=size + 1)
    instance = Instance(facts)
    for number in range(size):
        request = Request(id=number, prompt=(1, 2, 3), sampling=Sampling(max_tokens=400))
        instance.submit(request, 0.0)
    policy = BATCHING["split_fuse"]().build(facts)

    def work() -> None:
        for number in range(_STEPS_OF_A_QUEUE):
            _, steps = instance.next_steps(policy, float(number))
            for step in steps:
                results = {work.id: Result(7) for work in step.works}
                instance.apply(step, results, float(number))

    return work


def _write_answer(size: int, folder: pathlib.Path) -> Work:
    del folder
    tokenizer = ByteTokenizer()
    codec = TextOnly(tokenizer, is_imported=False)
    stops = ("a" * _STOP_LENGTH + "b", "word" * (_STOP_LENGTH // 4))
    tokens = tokenizer.encode_all(["aaaaaaaa word \u00e9\U0001f600"])[0].tolist()
    stream = TextStream(codec, stops, tokens)

    def work() -> None:
        for number in range(size):
            stream.add(tokens[number % len(tokens)])
        stream.finish()

    return work


def _simulate(size: int, folder: pathlib.Path) -> Work:
    del folder
    return importlib.import_module("experiments.serving.growth").simulate_requests(size)


def _plan(size: int, folder: pathlib.Path) -> Work:
    command = ["olmoe_1b_7b", "--topology", f"gpu:h100:{size}", "--compiles", "0"]
    command += ["--training.batch_size", str(4 * size), "--run.directory", str(folder / "plan")]

    def work() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            plan_command.main(command)  # where nothing fits, all was searched too

    return work


def _iterate(size: int, folder: pathlib.Path) -> Work:
    del folder
    directions = scale_by_muon()
    params = {"w": jnp.ones((size, 64, 128))}
    gradients = {"w": jax.random.normal(jax.random.key(0), (size, 64, 128))}
    state = directions.init(params)
    update = jax.jit(directions.update).lower(gradients, state, params).compile()
    return lambda: jax.block_until_ready(update(gradients, state, params))


CURVES: dict[str, GrowthCurve] = {
    "files": GrowthCurve(
        what="a warm start with text in many files",
        unit="files",
        sizes=(500, 2000, 8000),
        prepare=_write_files,
        begin=lambda size, folder: _source(folder).build,
    ),
    "text": GrowthCurve(
        what="reading one text file, byte tokenizer",
        unit="MB",
        sizes=(8, 32, 128),
        prepare=_write_text,
        begin=lambda size, folder: _source(folder).build,
    ),
    "resume": GrowthCurve(
        what="metrics.jsonl of a run that is resumed",
        unit="steps",
        sizes=(10_000, 40_000, 160_000),
        prepare=_write_metrics,
        begin=_resume,
    ),
    "report": GrowthCurve(
        what="curves of a report",
        unit="steps",
        sizes=(10_000, 40_000, 160_000),
        prepare=_write_metrics,
        begin=_draw,
    ),
    "loads": GrowthCurve(
        what="saving 1,024 records of 16 layers",
        unit="experts",
        sizes=(16, 64, 256),
        begin=_save_loads,
    ),
    "save": GrowthCurve(
        what="saving a state",
        unit="MB",
        sizes=(64, 256, 512),
        begin=_save,
    ),
    "restore": GrowthCurve(
        what="restoring a state, verified",
        unit="MB",
        sizes=(64, 256, 512),
        prepare=_write_state,
        begin=_restore,
    ),
    "queue": GrowthCurve(
        what=f"{_STEPS_OF_A_QUEUE} steps of an engine behind a queue",
        unit="requests",
        sizes=(100, 1000, 10_000),
        begin=_queue,
    ),
    "answer": GrowthCurve(
        what=f"the text of an answer with stop strings of {_STOP_LENGTH:,} characters",
        unit="tokens",
        sizes=(1000, 4000, 16_000),
        begin=_write_answer,
    ),
    "requests": GrowthCurve(
        what="simulated requests",
        unit="requests",
        sizes=(250, 1000, 4000),
        begin=_simulate,
    ),
    "chips": GrowthCurve(
        what="a plan of OLMoE without compiling",
        unit="chips",
        sizes=(8, 32, 128),
        begin=_plan,
    ),
    "experts": GrowthCurve(
        what="Muon's directions of matrices of 64 x 128",
        unit="experts",
        sizes=(32, 128, 512),
        begin=_iterate,
    ),
}


def main(arguments: list[str]) -> None:
    """Prepare or measure one point."""
    name, size, folder, *prepares = arguments
    curve = CURVES[name]
    if prepares:
        curve.prepare(int(size), pathlib.Path(folder))
        return
    work = curve.begin(int(size), pathlib.Path(folder))
    before, begin = peak_bytes(), time.process_time()
    work()
    print(json.dumps([time.process_time() - begin, peak_bytes() - before]))


if __name__ == "__main__":
    main(sys.argv[1:])
