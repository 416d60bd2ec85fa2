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

import jax

from jaxmoe.planning.compile_ahead import CompiledProgram, DoesNotFit


def main(argv: Sequence[str]) -> int:
    """Do one job and return the exit code."""
    file = pathlib.Path(argv[0])
    phase = pathlib.Path(f"{file}.phase")
    answer = pathlib.Path(f"{file}.result")
    job = json.loads(file.read_text(encoding="utf-8"))
    phase.write_text("importing MaxText")
    train_compile: Any = importlib.import_module("maxtext.trainers.pre_train.train_compile")
    if refusal := _refusal(train_compile, job):
        answer.write_text(json.dumps({"refused": refusal}), encoding="utf-8")
        return 0
    compile_step = train_compile.jit_and_compile
    compiled_steps = list[Any]()

    def keeping(function: Any, inputs: Any, keywords: Any, mesh: Any, *more: Any) -> Any:
        started = time.perf_counter()
        phase.write_text("tracing the step and compiling with XLA")
        compiled = compile_step(function, inputs, keywords, mesh, *more)
        compiled_steps.extend((compiled, mesh, time.perf_counter() - started))
        return compiled

    train_compile.jit_and_compile = keeping
    base = os.path.join(os.path.dirname(str(train_compile.__file__)), "../../configs/base.yml")
    phase.write_text("building the model")
    try:
        train_compile.main(["train_compile", os.path.normpath(base), *job["words"]])
    except jax.errors.JaxRuntimeError as error:
        result: Any = DoesNotFit.of(error)
    else:
        phase.write_text("reading the compiled program")
        compiled, mesh, seconds = compiled_steps
        result = CompiledProgram.of(compiled, dict(mesh.shape), seconds)
    record = {"kind": type(result).__name__} | dataclasses.asdict(result)
    answer.write_text(json.dumps(record), encoding="utf-8")
    return 0


def _refusal(train_compile: Any, job: dict[str, Any]) -> str:
    """Return why MaxText has no such topology; empty if it has."""
    name = dict(word.split("=", 1) for word in job["words"])["compile_topology"]
    systems = train_compile.accelerator_to_spec_map.UserFacingNameToSystemCharacteristics
    if name not in systems:
        sizes = [system for system in systems if system.partition("-")[0] == name.partition("-")[0]]
        return f"topology: MaxText has no {name}; it has {', '.join(sizes) or 'no such chip'}"
    shape = systems[name].topology_name.partition(":")[2]
    if shape != job["shape"]:
        return (
            f"topology: MaxText's {name} has the shape {shape}, not {job['shape']}:"
            f" choose {shape}, or --peer none"
        )
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
