# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Proves and measures kernels, steps, serving and runs on one accelerator (`bench accelerator`).

    jaxmoe bench accelerator --minutes 8
    jaxmoe bench accelerator --list
    jaxmoe bench accelerator --parts proofs step

First everything compiles side by side into one persistent cache, and what is a question of right or
wrong runs there; then each part measures alone. `accelerator.json` is written after every part, so
that a command that is cut short says what it learned. On a CPU the sizes are those of a test.

To add a part: a module of `experiments/bench/accelerator` that ends in `run_part`, and a row in
`PARTS` of `experiments/bench/accelerator/command.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from experiments.bench.accelerator.schedule import BenchPart, PartOutcome, run_alone, run_together
from experiments.bench.step import BenchRunConfig
from experiments.cli.output import say

_PLACE = "experiments.bench.accelerator"

PARTS: tuple[BenchPart, ...] = (
    BenchPart(
        name="machine",
        module=f"{_PLACE}.machine",
        line="the device, dense products and a copy",
        compile_seconds=120,
        seconds=40,
    ),
    BenchPart(
        name="proofs",
        module=f"{_PLACE}.proofs",
        line="each kernel beside the reference, value and gradients",
        compile_seconds=200,
        is_measured=False,
    ),
    BenchPart(
        name="step",
        module=f"{_PLACE}.step",
        line="a training step of OLMoE's width, 4 layers, and where its time goes",
        compile_seconds=200,
        seconds=60,
        options={"is_profiled": True},
    ),
    BenchPart(
        name="torch_step",
        module=f"{_PLACE}.torch_step",
        line="the same in plain PyTorch, compiled",
        seconds=90,
    ),
    BenchPart(
        name="attention",
        module=f"{_PLACE}.attention",
        line="attention beside cuDNN",
        compile_seconds=200,
        seconds=60,
    ),
    BenchPart(
        name="grouped",
        module=f"{_PLACE}.grouped",
        line="products of experts",
        compile_seconds=200,
        seconds=60,
    ),
    BenchPart(
        name="torch_kernels",
        module=f"{_PLACE}.torch_kernels",
        line="PyTorch's products, SDPA and _grouped_mm",
        seconds=40,
    ),
    BenchPart(
        name="serve",
        module=f"{_PLACE}.serve",
        line="prefill and decode of OLMoE for 1, 8 and 64 requests",
        compile_seconds=220,
        seconds=70,
        options={"is_profiled": True},
    ),
    BenchPart(
        name="runs",
        module=f"{_PLACE}.runs",
        line="pretrain tiny: first step, the CPU's losses, a checkpoint across devices",
        compile_seconds=220,
        seconds=60,
        fraction=0.75,
    ),
    BenchPart(
        name="suite",
        module=f"{_PLACE}.suite",
        line="the tests that need an accelerator",
        compile_seconds=220,
        is_measured=False,
        options={"seconds": 200, "workers": 4},
    ),
    BenchPart(
        name="remat",
        module=f"{_PLACE}.step",
        line="the step with remat full",
        compile_seconds=200,
        seconds=40,
        options={"remat": "full"},
    ),
    BenchPart(
        name="deep",
        module=f"{_PLACE}.step",
        line="the step with 8 layers and remat full",
        compile_seconds=200,
        seconds=40,
        fraction=0.95,
        options={"remat": "full", "layers": 8},
    ),
    BenchPart(
        name="few_bits",
        module=f"{_PLACE}.few_bits",
        line="products of few bits",
        compile_seconds=200,
        seconds=40,
    ),
    BenchPart(
        name="transformers_step",
        module=f"{_PLACE}.transformers_peer",
        line="the step in transformers",
        seconds=50,
        options={"work": "step"},
    ),
    BenchPart(
        name="transformers_serve",
        module=f"{_PLACE}.transformers_peer",
        line="answers of transformers",
        seconds=90,
        options={"work": "answers"},
    ),
)
"""Parts, most worth first."""

_COMPILE_SHARE = 0.5
"""Share of the time after which the measurements begin."""
_REHEARSAL = 4
"""How many times the limits of the parts a rehearsal on CPUs has: nothing in it is measured."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AcceleratorBenchConfig:
    """What to prove and measure."""

    run: BenchRunConfig = BenchRunConfig()
    """Output directory, with accelerator.json, and rows and logs of the parts."""
    minutes: float = 8.0
    """Time for all of it."""
    parts: tuple[str, ...] = ()
    """Parts to run; all when empty."""
    workers: int | None = None
    """Processes that compile side by side; half of the processors when None."""
    is_tiny: bool | None = None
    """Whether sizes are those of a test; on a CPU alone when None."""

    def __post_init__(self):
        part_names = [part.name for part in PARTS]
        for name in self.parts:
            if name not in part_names:
                raise ValueError(f"parts: {name!r} is none of {', '.join(part_names)}")
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"minutes={self.minutes} must be above 0 and finite")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers} must be at least 1")


def bench_accelerator(config: AcceleratorBenchConfig) -> dict[str, Any]:
    """Run the parts, and return the numbers of summary.json."""
    directory = pathlib.Path(config.run.directory or "runs/bench/accelerator").expanduser()
    parts = [part for part in PARTS if not config.parts or part.name in config.parts]
    start_time = time.monotonic()
    is_tiny = not _has_accelerator() if config.is_tiny is None else config.is_tiny
    if is_tiny:
        parts = [part.with_limits(_REHEARSAL) for part in parts]
    workers = config.workers or max(1, (os.cpu_count() or 2) // 2)
    summary: dict[str, Any] = {"is_tiny": is_tiny, "minutes": config.minutes, "outcomes": []}

    def keep(outcome: PartOutcome) -> None:
        summary["outcomes"].append(dataclasses.asdict(outcome))
        part = directory / "accelerator.json.part"
        part.write_text(json.dumps(summary, indent=1))
        part.replace(directory / "accelerator.json")
        result_line = "done" if outcome.error is None else outcome.error.splitlines()[0]
        doing = "compiled" if outcome.phase == "compile" else "measured"
        say(f"{doing} {outcome.part}: {result_line}, {outcome.seconds:.0f} s")

    directory.mkdir(parents=True, exist_ok=True)
    until = start_time + 60.0 * config.minutes
    share = _COMPILE_SHARE if any(part.is_measured for part in parts) else 1.0
    for outcome in run_together(
        parts,
        directory,
        is_tiny=is_tiny,
        workers=workers,
        until=start_time + 60.0 * config.minutes * share,
    ):
        keep(outcome)
    for outcome in run_alone(parts, directory, is_tiny=is_tiny, until=until):
        keep(outcome)
    return summary


def parts_in_words() -> str:
    """Return a line per part."""
    return "\n".join(f"{part.name:20} {part.line}" for part in PARTS)


def in_words(summary: dict[str, Any]) -> str:
    """Return one table of all rows."""
    lines = []
    seen = dict[tuple[str, str], str]()
    for outcome in summary["outcomes"]:
        for row in outcome["rows"]:
            seen[row["case"], row["name"]] = _row_in_words(row)
    width = max((len(case) for case, _ in seen), default=0)
    for case in dict.fromkeys(case for case, _ in seen):
        for (part, name), description in seen.items():
            if part == case:
                lines.append(f"{case:{width}}  {name:28} {description}")
    for outcome in summary["outcomes"]:
        if outcome["error"] is not None:
            first, *detail_lines = outcome["error"].splitlines()
            lines.append(f"{outcome['phase']} {outcome['part']}: {first}")
            lines += [f"    {line}" for line in detail_lines]
    return "\n".join(lines)


_UNITS = {
    "ms": "{:.3f} ms",
    "tflops": "{:.0f} TFLOP/s",
    "tb_per_second": "{:.2f} TB/s",
    "tokens_per_second": "{:.0f} tokens/s",
    "prefill_tokens_per_second": "prefill {:.0f} tokens/s",
    "compile_seconds": "compiled in {:.1f} s",
    "first_seconds": "first {:.1f} s",
    "seconds": "{:.0f} s in all",
    "largest_error": "largest error {:.2g}",
    "largest_distance": "largest distance {:.2g}",
    "passed": "{} passed",
    "failed": "{} failed",
}


def _row_in_words(row: dict[str, Any]) -> str:
    fields = [form.format(row[key]) for key, form in _UNITS.items() if row.get(key) is not None]
    if row.get("peak_bytes"):
        fields.append(f"peak {row['peak_bytes'] / 1e9:.1f} GB")
    if row.get("is_right") is False:
        fields.append("WRONG")
    if row.get("stopped"):
        fields.append(f"stopped {row['stopped']}")
    if row.get("refused"):
        fields.append(row["refused"])
    if row.get("repeats_bitwise") is not None:
        fields.append("repeats bitwise" if row["repeats_bitwise"] else "does not repeat bitwise")
    if row.get("kinds_ms"):
        fields += [f"{kind} {ms:.1f}" for kind, ms in row["kinds_ms"].items()]
    if row.get("error"):
        fields.append(row["error"])
    return ", ".join(fields)


def _has_accelerator() -> bool:
    """Return whether a device that is no CPU is here; this process holds none."""
    program = "import jax; print(jax.devices()[0].platform)"
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.returncode == 0 and answer.stdout.strip() != "cpu"
