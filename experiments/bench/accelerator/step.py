# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A training step of OLMoE's width, with the kernels that None chooses.

float32 parameters and moments, products in bfloat16, AdamW, clipping, 4 sequences of 4096 tokens.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.accelerator.profiled import profile
from experiments.bench.accelerator.work import FAILURES, BenchWork, emit, emit_failure, run_part
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig, KernelsConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.models.presets import olmoe_1b_7b
from jaxmoe.optim import adamw
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.run.compile import compiler_options
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step

STEPS = 14
WARM_UP = 4
BATCHES = 8


def model_of(num_layers: int, *, is_tiny: bool) -> ModelConfig:
    """Return OLMoE with fewer layers.

    Args:
        num_layers: Number of layers.
        is_tiny: Whether widths are those of a test.
    """
    model = dataclasses.replace(olmoe_1b_7b(), num_layers=num_layers)
    if not is_tiny:
        return model
    attention: Any = dataclasses.replace(
        model.attention,  # pyright: ignore
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
    )
    assert model.moe is not None
    moe = dataclasses.replace(model.moe, num_experts=8, top_k=2, expert_dim=32)
    return dataclasses.replace(
        model, embed_dim=64, vocab_size=512, dense_dim=32, attention=attention, moe=moe
    )


def step(work: BenchWork) -> None:
    """Emit the row of a step: options `remat`, `layers`, `attention` and `is_profiled`."""
    layers = 2 if work.is_tiny else int(work.options.get("layers", 4))
    remat = work.options.get("remat", "none")
    row: dict[str, Any] = {
        "case": f"step, {layers} layers, remat {remat}",
        "name": "jaxmoe",
    }
    if "attention" in work.options:
        row["name"] = f"jaxmoe, attention by {work.options['attention']}"
    try:
        _measure(work, row, layers, remat)
    except FAILURES as error:
        emit_failure(error, **row)
    else:
        emit(**row)


class _BenchProgram(NamedTuple):
    """Compiled programs of one case."""

    begin: Any
    """Function of a key that returns the initial state."""
    step: Any
    """Function of a state and a batch that returns the next state and its metrics."""
    batches: list[Batch]


def _measure(work: BenchWork, row: dict[str, Any], layers: int, remat: Any) -> None:
    batch, length = (2, 64) if work.is_tiny else (4, 4096)
    model = model_of(layers, is_tiny=work.is_tiny)
    execution = ExecutionConfig(
        remat=remat,
        kernels=KernelsConfig(attention=work.options.get("attention")),
        precision=PrecisionPolicy(compute="bfloat16"),
    )
    optimizer = adamw(3e-4, weight_decay=0.1)
    key = jax.random.key(0)
    started = time.perf_counter()
    begin = jax.jit(lambda key: init_state(model, optimizer, key)).lower(key).compile()
    row["initial_state_seconds"] = round(time.perf_counter() - started, 1)
    started = time.perf_counter()
    shapes = jax.eval_shape(lambda key: init_state(model, optimizer, key), key)
    batch_shapes = jax.eval_shape(lambda: _batch(model, 0, batch, length))
    trained = make_train_step(model, optimizer, execution=execution)
    compiled = trained.lower(shapes, batch_shapes).compile(compiler_options() or None)
    row["compile_seconds"] = round(time.perf_counter() - started, 1)
    memory = compiled.memory_analysis()
    if memory is not None:
        row["temporary_bytes"] = memory.temp_size_in_bytes
        row["argument_bytes"] = memory.argument_size_in_bytes
    row["parameters"] = int(sum(x.size for x in jax.tree.leaves(shapes.params)))
    if not work.is_measured:
        return
    batches = [_batch(model, number, batch, length) for number in range(BATCHES)]
    program = _BenchProgram(begin, compiled, batches)
    seconds, losses = _run(program, STEPS)
    median = float(np.median(seconds[WARM_UP:]))
    flops = flops_per_token(model, parameter_table(model), length) * batch * length
    row |= {
        "ms": round(1e3 * median, 1),
        "tokens_per_second": round(batch * length / median),
        "tflops": round(flops / median / 1e12, 1),
        "losses": [round(loss, 4) for loss in losses],
    }
    statistics = jax.local_devices()[0].memory_stats() or {}
    row["peak_bytes"] = statistics.get("peak_bytes_in_use")
    row["repeats_bitwise"] = _run(program, WARM_UP)[1] == losses[:WARM_UP]
    if work.options.get("is_profiled"):
        row |= _profile(program)


def _run(program: _BenchProgram, steps: int) -> tuple[list[float], list[float]]:
    """Return the seconds and the losses of steps from the initial state."""
    state = program.begin(jax.random.key(0))
    seconds = []
    losses = []
    for number in range(steps):
        jax.block_until_ready(state)
        started = time.perf_counter()
        state, metrics = program.step(state, program.batches[number % BATCHES])
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - started)
        losses.append(float(metrics.loss))
    return seconds, losses


def _profile(program: _BenchProgram) -> dict[str, Any]:
    """Return milliseconds of a step by kind of kernel, and of its longest kernels."""
    state = program.begin(jax.random.key(0))
    steps = 2

    def run() -> None:
        nonlocal state
        for number in range(steps):
            state, _ = program.step(state, program.batches[number])
            jax.block_until_ready(state.params)

    return profile(run, steps)


def _batch(model: ModelConfig, number: int, batch: int, length: int) -> Batch:
    rows = np.random.default_rng(number).integers(0, model.vocab_size, (batch, length + 1))
    tokens = jnp.asarray(rows, jnp.int32)
    ones = jnp.ones((batch, length), jnp.float32)
    return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], loss_weights=ones)


if __name__ == "__main__":
    run_part(step)
