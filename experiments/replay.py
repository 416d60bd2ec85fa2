# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replays the batch of a refused step, to find the row or the array at fault.

    jaxmoe replay runs/pretrain/tiny [--step 1234]

Computes loss and gradient of the batch that the run dumped when it rolled back
(bad_data/step1234.npz), with the parameters of the newest checkpoint before that step, or the
initial ones; `--run.step` takes an older checkpoint. Prints the arrays of the gradient that are not
finite, or the largest, and the rows by the loss and gradient that each has alone, repeated to fill
the batch. If nothing is wrong here, the state of the step was, or the device: the parameters are
those of the checkpoint, not of the step. Writes bad_data/replay<step>/summary.json.
`--run.mesh.data 1` replays on another number of devices than the training used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.model import with_about, with_model
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from experiments.evaluate import FinishedRunConfig
from jaxmoe.contrib.survival.replay import replay_run

_SHOWN = 8
"""Number of rows, and of arrays, that are printed; summary.json has all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """Refused step to replay."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Trained run; `run.step` is that of the checkpoint, the newest before the refused step when
    None."""
    step: int | None = None
    """Refused step; the first of those refused last when None."""

    def __post_init__(self):
        if self.run.initial is not None:
            raise ValueError(
                f"run.initial={self.run.initial}: a step is replayed with the model that the run"
                " names: leave it out"
            )


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prog = "jaxmoe replay"
    config = flags.parse_flags(ReplayConfig(), with_model(argv), prog, with_about(__doc__))
    with flags.exit_on_bad_configuration():
        start_process()
        run = config.run
        findings = replay_run(run.directory, refused_step=config.step, step=run.step, mesh=run.mesh)
    say(format_findings(findings))
    return int(ExitCode.DONE)


def format_findings(findings: dict[str, Any]) -> str:
    """Return the batch, its worst arrays and its worst rows as tables."""
    limit = findings["norm_limit"]
    bound = ""
    if math.isfinite(limit):
        bound = f" ({findings['judged_norm']:.4g} without embeddings, whose bound is {limit:.4g})"
    bad = findings["not_finite"]
    lines = [
        f"step {findings['refused_step']}, with the parameters of step"
        f" {findings['checkpoint_step']}: loss {findings['loss']:.4g}, gradient norm"
        f" {findings['grad_norm']:.4g}{bound};"
        f" {f'{bad} numbers of the gradient are' if bad else 'all of it is'}"
        f" {'not ' * bool(bad)}finite",
        "",
    ]
    arrays = findings["arrays"]
    rows = findings["rows"]
    table = [("array of the gradient", "norm", "not finite")]
    table += [(x["array"], f"{x['grad_norm']:.4g}", str(x["not_finite"])) for x in arrays[:_SHOWN]]
    lines += [text_table(table), ""]
    table = [("row alone", "place", "loss", "gradient norm", "not finite")]
    for x in rows[:_SHOWN]:
        numbers = (f"{x['loss']:.4g}", f"{x['grad_norm']:.4g}", str(x["not_finite"]))
        table.append((str(x["row"]), str(x["place"]), *numbers))
    lines.append(text_table(table))
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
