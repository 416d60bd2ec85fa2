# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures how fast this machine is, so that a budget of time means the same work everywhere.

    python -m tests.support.speed    seconds of the fixed program, and the factor
    python -m tests.support.speed --minutes 40 --most 70
                                       the minutes that 40 at full speed are here

The fixed program does what the suite does: it traces and compiles. It runs in as many processes at
once as the suite has workers, and the slowest counts: with one core the factor is about two.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys

# Seconds on two cores of an AMD EPYC with nothing beside, on 2026-11-27.
FULL_SPEED_SECONDS = 2.5
WORKERS = 2

PROGRAM = """
import time
import jax, jax.numpy as jnp
jax.config.update("jax_enable_compilation_cache", False)
x = jnp.ones((8, 8))
start = time.perf_counter()
for number in range(3):
    def layers(x):
        for layer in range(12):
            x = jnp.tanh(x @ x + float(number)) + jax.nn.softmax(x, axis=layer % 2)
        return jnp.sum(x)
    jax.jit(jax.grad(layers)).lower(x).compile()
print(time.perf_counter() - start)
"""


def measured_seconds() -> float:
    """Return the seconds that the slowest of WORKERS processes takes for the fixed program."""
    command = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(WORKERS)
    ]
    outputs = [process.communicate()[0] for process in processes]
    return max(map(float, outputs))


def budget_minutes(minutes: float, most: float, seconds: float) -> int:
    """Return what so many minutes at full speed are here, at least themselves, at most `most`.

    Args:
        minutes: At full speed.
        most: On the slowest machine.
        seconds: That the fixed program took here.
    """
    factor = max(1.0, seconds / FULL_SPEED_SECONDS)
    return math.floor(min(most, minutes * factor))


def main() -> None:
    """Print the factor, or a budget."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--most", type=float, default=math.inf)
    arguments = parser.parse_args()
    seconds = measured_seconds()
    if arguments.minutes is None:
        factor = seconds / FULL_SPEED_SECONDS
        print(f"{seconds:.2f} s, {factor:.2f} times those at full speed")
    else:
        print(budget_minutes(arguments.minutes, arguments.most, seconds))


if __name__ == "__main__":
    main()
