# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Child process of `bench compiled`: compiles a step with MaxText's own `train_compile`.

python -m experiments.bench.maxtext_step JOB.json

Runs under a Python that has MaxText and jax; the job holds the words of its command line, and the
result, JOB.json.result, the compiler's figures. Internal to `bench`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxmoe.planning.compile_ahead import CompiledProgram


def main(argv: Sequence[str]) -> int:
    """Do one job and return the exit code."""
    train_compile: Any = importlib.import_module("maxtext.trainers.pre_train.train_compile")
    file = pathlib.Path(argv[0])
    job = json.loads(file.read_text(encoding="utf-8"))
    compile_step, kept = train_compile.jit_and_compile, list[Any]()

    def keeping(function: Any, inputs: Any, keywords: Any, mesh: Any, *more: Any) -> Any:
        started = time.perf_counter()
        compiled = compile_step(function, inputs, keywords, mesh, *more)
        kept.extend((compiled, mesh, time.perf_counter() - started))
        return compiled

    train_compile.jit_and_compile = keeping
    base = os.path.join(os.path.dirname(str(train_compile.__file__)), "../../configs/base.yml")
    train_compile.main(["train_compile", os.path.normpath(base), *job["words"]])
    compiled, mesh, seconds = kept
    result = dataclasses.asdict(CompiledProgram.of(compiled, dict(mesh.shape), seconds))
    pathlib.Path(f"{file}.result").write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
