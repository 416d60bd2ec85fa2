# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Whether kernels are right: each that may be chosen beside the reference, value and gradients."""

from __future__ import annotations

from experiments.bench.accelerator.work import BenchWork, emit, run_part
from pallas_kernels import OPERATIONS
from pallas_kernels.backend import Implementation
from pallas_kernels.proof import CASES, compare


def proofs(work: BenchWork) -> None:
    """Emit a row for each implementation of an operation that has a case."""
    for name, cases in CASES.items():
        for case in cases:
            for implementation in OPERATIONS[name].runnable():
                if implementation != "reference":
                    _emit(work, name, case, implementation)


def _emit(work: BenchWork, name: str, case: str, implementation: Implementation) -> None:
    verdict = compare(name, implementation, case, scales=(1,) if work.is_tiny else (1, 3, 8))
    is_refused = verdict.error is None and verdict.explanation.startswith("ValueError")
    row = {"case": f"proof of {name} {case}".strip(), "name": implementation}
    if is_refused:
        emit(**row, refused=verdict.explanation)
    else:
        emit(
            **row,
            is_right=verdict.is_right,
            largest_error=verdict.error,
            words=verdict.explanation,
        )


if __name__ == "__main__":
    run_part(proofs)
