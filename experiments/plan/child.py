# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Child process of `plan`: compiles one mesh and, on fake devices, runs it.

python -m experiments.plan.child JOB.json

The job holds a config of pretrain with its mesh, a topology and a number of steps to run; the
result, JOB.json.result, holds the compiler's figures and the measurements. Internal to `plan`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.bench.measure import matmul_rate
from experiments.cli.process import configure_logging
from experiments.plan.config import on_platform, step_plan
from jaxmoe.configs import from_json
from jaxmoe.data.batch import Batch
from jaxmoe.planning.abstract_step import StepPlan, planned_step
from jaxmoe.planning.compile_ahead import CompiledStep, compile_step
from jaxmoe.planning.hardware import parse_topology
from jaxmoe.run.compile import gpu_options
from jaxmoe.run.config import PretrainConfig
from jaxmoe.training.measures.throughput import peak_memory
from jaxmoe.training.state import init_state
from sharding.distributed import global_batch
from sharding.mesh import make_mesh


def main(argv: Sequence[str]) -> int:
    """Do one job and return the exit code."""
    configure_logging()
    file = pathlib.Path(argv[0])
    job = json.loads(file.read_text(encoding="utf-8"))
    topology = parse_topology(job["topology"])
    config = from_json(PretrainConfig, job["config"])
    plan = step_plan(config, topology, config.execution.mesh)
    phase = pathlib.Path(f"{file}.phase")
    try:
        compiled = compile_step(
            plan,
            topology,
            on_phase=phase.write_text,
            compiler_options=gpu_options() if topology.chip.platform == "gpu" else None,
        )
    except ValueError as error:  # about the topology; the parent raises it
        pathlib.Path(f"{file}.result").write_text(json.dumps({"refused": str(error)}), "utf-8")
        return 0
    result: dict[str, Any] = {"kind": type(compiled).__name__} | dataclasses.asdict(compiled)
    if isinstance(compiled, CompiledStep):
        result["total"] = compiled.total
        if job["steps"]:
            phase.write_text(f"running {job['steps']} steps")
            result["measured"] = run_steps(on_platform(config, "cpu"), plan, job["steps"])
    pathlib.Path(f"{file}.result").write_text(json.dumps(result), encoding="utf-8")
    return 0


def run_steps(config: PretrainConfig, plan: StepPlan, steps: int) -> dict[str, float]:
    """Run the plan on this machine's devices with random tokens, and return measurements.

    Args:
        config: Run with the seed.
        plan: Step to run.
        steps: Number of timed steps, after one that is not timed.
    """
    mesh = make_mesh(plan.execution.mesh, fold=plan.execution.mesh_fold)
    before, _ = peak_memory(jax.local_devices())
    key = jax.random.key(config.training.seed)
    state = init_state(plan.model, plan.optimizer, key, execution=plan.execution, mesh=mesh)
    step = planned_step(plan)
    shape = (plan.batch_size, plan.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(plan.model.vocab_size - 1, size=shape, dtype="int32")
    rows = Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_weights=np.ones(tokens[:, 1:].shape, np.float32),
    )
    seconds = []
    with jax.set_mesh(mesh):
        batch = global_batch(rows, mesh)
        for _ in range(steps + 1):
            started = time.perf_counter()
            state, metrics = step(state, batch)
            loss = float(jax.block_until_ready(metrics).loss)
            seconds.append(time.perf_counter() - started)
    after, _ = peak_memory(jax.local_devices())
    return {
        "step_seconds": statistics.median(seconds[1:]),
        "memory": (after - before) / mesh.size,
        "matmul_rate": matmul_rate(),
        "loss": loss,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
