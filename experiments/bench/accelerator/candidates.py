# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles or measures one candidate written in JAX, on two sets of random inputs in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from experiments.bench.accelerator.work import (
    FAILURES,
    BenchWork,
    emit,
    emit_failure,
    median_seconds,
    rates,
)

_SETS = 2


def candidate(
    work: BenchWork,
    case: str,
    name: str,
    function: Callable[..., Any],
    draw: Callable[[jax.Array], tuple[Any, ...]],
    *,
    flops: float | None = None,
    moved: float | None = None,
    calls: int = 8,
) -> None:
    """Emit the row of one candidate: compile seconds, temporaries, and where measured the rate.

    Args:
        work: What the part does.
        case: Sizes, as the rows of other candidates name them.
        name: Name of the candidate.
        function: Function to compile.
        draw: Function of a key that returns random arguments.
        flops: Floating-point operations of a call, for a rate in TFLOP/s.
        moved: Bytes that a call must read and write, for a rate in TB/s.
        calls: Calls in flight, of which the last is waited for.
    """
    row: dict[str, Any] = {"case": case, "name": name}
    try:
        key = jax.random.key(0)
        drawn = jax.jit(draw).lower(key).compile()
        started = time.perf_counter()
        compiled = jax.jit(function).lower(*jax.eval_shape(draw, key)).compile()
        row["compile_seconds"] = round(time.perf_counter() - started, 2)
        memory = compiled.memory_analysis()
        if memory is not None:
            row["temporary_bytes"] = memory.temp_size_in_bytes
        if work.is_measured:
            inputs = [drawn(jax.random.key(number)) for number in range(_SETS)]

            def call(number: int) -> None:
                results = [compiled(*inputs[number % _SETS]) for _ in range(calls)]
                jax.block_until_ready(results[-1])

            row |= rates(median_seconds(call) / calls, flops=flops, moved=moved)
    except FAILURES as error:
        emit_failure(error, **row)
    else:
        emit(**row)


def with_gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function of arguments and a cotangent that returns gradients.

    Args:
        function: Function of arrays.
        count: Number of first arguments that have a gradient.
    """

    def run(*arguments: Any) -> Any:
        *operands, cotangent = arguments
        constants = operands[count:]
        _, pull = jax.vjp(lambda *first: function(*first, *constants), *operands[:count])
        return pull(cotangent)

    return run
