# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares policies of serving on simulated instances and traces, and puts load on a server.

    jaxmoe serving simulate [--preset qwen3_30b_a3b --chip h100] [--rates 4 8 12]
    jaxmoe serving caches --run.directory RUN [--capacity 0.25 0.5]
    jaxmoe serving advise [--preset qwen3_30b_a3b --chip h100]
    jaxmoe serving load --url http://127.0.0.1:8000 [--workload.rate 4]

To add a command: `experiments/serving/__main__.py` (a line in `COMMANDS`), and a file with `main`
beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.cli.exit import run_command
from experiments.cli.parts import Part, run_part
from experiments.serving import advise as serving_advise
from experiments.serving import caches as serving_caches
from experiments.serving import load as serving_load
from experiments.serving import simulate as serving_simulate

COMMANDS: dict[str, Part] = {
    "advise": serving_advise.main,
    "caches": serving_caches.main,
    "load": serving_load.main,
    "simulate": serving_simulate.main,
}
"""Functions by the first word; each takes the other words and returns the exit code."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    return run_part(COMMANDS, argv, __doc__)


if __name__ == "__main__":
    run_command(main)
