# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the train step of a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.data import Batch
from jaxmoe.run.assemble import Assembly
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics
from pallas_kernels.backend import platform

CompiledStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
"""A train step that picks its program by the number of rows of the batch; donates the state."""

GPU_OPTIONS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
"""Options of XLA for the train step on a GPU. Without Triton's candidates for dense products the
search for the fastest is short, and the step as fast: 111.3 beside 111.1 ms for OLMoE's width on an
H100 (2026-11-27)."""


LARGE_TEMPORARIES = 1 << 28
"""Bytes of temporaries from which a CPU computes one step at a time."""


def compiler_options(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the options that the train step is compiled with on the mesh in context.

    Args:
        environment: Environment variables; what XLA_FLAGS sets is left as it is.
    """
    return gpu_options(environment) if platform() == "gpu" else {}


def gpu_options(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the options that the train step is compiled with on a GPU.

    Args:
        environment: Environment variables; what XLA_FLAGS sets is left as it is.
    """
    flags = environment.get("XLA_FLAGS", "")
    return {name: value for name, value in GPU_OPTIONS.items() if name not in flags}


def compile_steps(assembly: Assembly, first_step: int, state: TrainState) -> CompiledStep:
    """Compile the train step on its mesh, once for each batch size that is still to come.

    Args:
        assembly: Plan, devices and data of the run.
        first_step: Number of steps already done.
        state: State whose shapes and shardings the programs take, or these alone; not donated.
    """
    training = assembly.plan.config.training
    programs = {}
    stages = training.batch_sizes.stages
    ends = [first for first, _ in stages[1:]] + [training.steps]
    for (first, rows), end in zip(stages, ends, strict=True):
        if end <= first_step:
            continue
        with jax.set_mesh(assembly.mesh):
            step_function = assembly.workers.jit_step(assembly.step(assembly.micro_batches(rows)))
            batch = assembly.feed.batch(max(first, first_step))
            rows = batch.tokens.shape[0]
            if _has_int4(state):
                programs[rows] = step_function
            else:
                lowered = step_function.lower(state, batch)
                programs[rows] = one_at_a_time(compile_with(lowered, compiler_options()))
    return lambda state, batch: programs[batch.tokens.shape[0]](state, batch)


def compile_with(lowered: Any, options: Mapping[str, Any]) -> Any:
    """Compile a program with options, or as XLA does by itself where it cannot with them.

    Args:
        lowered: Program; has `compile`.
        options: Options of XLA for this program.

    Raises:
        jax.errors.JaxRuntimeError: XLA cannot compile it either way, or lacks memory.
    """
    try:
        return lowered.compile(dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        if not options or "RESOURCE_EXHAUSTED" in str(error):
            raise
        # cuBLAS has no product of factors of two dtypes; Triton has.
        names = ", ".join(f"{name}={value}" for name, value in options.items())
        reason = str(error).splitlines()[0][:200]
        warnings.warn(f"the step compiles without {names}: {reason}", stacklevel=2)
        return lowered.compile()


def one_at_a_time(program: Any) -> Any:
    """Return a program that ends before it returns, where steps that wait would take much memory.

    A CPU holds the temporaries of every step that has been started; an accelerator uses the memory
    of one again.

    Args:
        program: Compiled for the mesh in context.
    """
    analysis = program.memory_analysis() if platform() == "cpu" else None
    if analysis is None or analysis.temp_size_in_bytes < LARGE_TEMPORARIES:
        return program
    return lambda state, batch: jax.block_until_ready(program(state, batch))


def _has_int4(state: TrainState) -> bool:
    """Return whether weights are in 4 bits; such a step is compiled when it is first called.

    A program compiled ahead refuses int4 arrays: JAX 0.10 to 0.12 compare their layout as the array
    reports it, without the number of bits, with the one that XLA requires.
    """
    return any(leaf.dtype == jnp.int4 for leaf in jax.tree.leaves(state.params))
