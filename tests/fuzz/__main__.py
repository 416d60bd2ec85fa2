# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs draws of the fuzzers by hand.

    python -m tests.fuzz --seed 1 --draws 200                   of every kind
    python -m tests.fuzz --seed 1 --draws 200 --kind meshes     of one kind
    python -m tests.fuzz --seed 1 --first 17 --draws 1 --kind meshes    one draw again
    python -m tests.fuzz --seed 1 --draws 2000 --seconds 1200 --kind pairs    for 20 minutes

A failure prints the command that repeats it; the exit code is 1 if a draw failed.
"""

import argparse
import collections
import os
import sys
import time

from tests import conftest  # sets devices and strictness before JAX starts

# Draws are new programs. Programs that were read from the cache have hung: XLA for the CPU began
# their collectives in another order on each device. JAX was imported above: no variable reaches it.
conftest.jax.config.update("jax_enable_compilation_cache", False)
# Most draws compile much and compute little.
os.environ["XLA_FLAGS"] += (
    " --xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def main() -> int:
    """Run the draws, print one line each and the counts, and return the exit code."""
    from tests.fuzz.draws import KINDS, Failure, run

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="seed of the draws")
    parser.add_argument("--draws", type=int, default=20, help="number of draws of each kind")
    parser.add_argument("--first", type=int, default=0, help="index of the first draw")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin none after these"
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="kinds to run; default: all")
    asked = parser.parse_args()
    assert conftest.NUM_DEVICES == 8
    failures = 0
    end = time.monotonic() + asked.seconds
    sys.stdout.reconfigure(errors="backslashreplace")
    for kind in asked.kind or KINDS:
        counts: collections.Counter[str] = collections.Counter()
        for index in range(asked.first, asked.first + asked.draws):
            start = time.monotonic()
            if start > end:
                break
            try:
                name, text = run(kind, asked.seed, index)
            except Failure as failure:
                name, text = "FAILED", str(failure)
                failures += 1
            counts[name] += 1
            seconds = time.monotonic() - start
            print(f"{kind} {asked.seed}:{index} {name} ({seconds:.1f} s) {text}", flush=True)
        print(f"{kind}: {sum(counts.values())} draws: {dict(sorted(counts.items()))}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
