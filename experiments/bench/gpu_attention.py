# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures flash_attention on a GPU, forward and backward, beside cuDNN and the measured limit.

    ours     implementation="pallas_gpu"
    cuDNN    jax.nn.dot_product_attention(implementation="cudnn")
    XLA      ours with implementation="xla"

bfloat16, causal; candidates take turns and medians count. A rate counts only the products of the
visible half: 2 B N S^2 H forward, two and a half times that backward. The limit is the rate of a
large dense product in bfloat16. Without a GPU every row is marked as unmeasured.

To add a candidate: a line in `_candidates` of `experiments/bench/gpu_attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.bench.measure import in_turns, timed
from pallas_kernels import flash_attention

# Ratio of the products of the backward pass to those of the forward pass: five to two.
PRODUCTS = {"forward": 1.0, "backward": 2.5}
LIMIT_WIDTH = 8192


class Shape(NamedTuple):
    """Shape of queries, keys and values."""

    batch: int
    length: int
    heads: int
    width: int

    def in_words(self) -> str:
        """Return the shape for a table."""
        return f"{self.batch} x {self.length}, {self.heads} heads of {self.width}"


LONG = Shape(batch=4, length=8192, heads=16, width=128)


def gpu_attention(rounds: int, shape: Shape = LONG) -> list[dict[str, Any]]:
    """Return a row per candidate and pass, measured where there is a GPU.

    Args:
        rounds: Counted runs per candidate.
        shape: Shape of the operands.
    """
    candidates = _candidates()
    if jax.default_backend() == "gpu":
        return measured(candidates, shape, rounds, _limit())
    return [
        {"pass": name, "candidate": candidate, "case": shape.in_words(), "seconds": None}
        for name in PRODUCTS
        for candidate in candidates
    ]


def measured(
    candidates: Mapping[str, Callable[..., Any]], shape: Shape, rounds: int, limit: float
) -> list[dict[str, Any]]:
    """Return rows with seconds, FLOP/s, the fraction of the limit, and the ratio to cuDNN's speed.

    Args:
        candidates: Functions of q, k and v; ratios compare with the second.
        shape: Shape of the operands.
        rounds: Counted runs per candidate.
        limit: Measured limit in FLOP/s.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    dims = (shape.batch, shape.length, shape.heads, shape.width)
    q, k, v, d_out = (jax.random.normal(key, dims, jnp.bfloat16) for key in keys)
    forward = {name: timed(f, q, k, v) for name, f in candidates.items()}
    pulls = {name: _pull(f, q, k, v) for name, f in candidates.items()}
    backward = {name: timed(lambda pull, x: pull(x), pull, d_out) for name, pull in pulls.items()}
    products = 2.0 * shape.batch * shape.heads * shape.length**2 * shape.width
    rows = []
    for name, runs in (("forward", forward), ("backward", backward)):
        seconds = {c: t.median for c, t in in_turns(runs, rounds=rounds).items()}
        beside = list(seconds.values())[1]
        for candidate, median in seconds.items():
            rate = PRODUCTS[name] * products / median
            rows.append(
                {
                    "pass": name,
                    "candidate": candidate,
                    "case": shape.in_words(),
                    "seconds": median,
                    "flops_per_second": rate,
                    "fraction_of_limit": rate / limit,
                    "ratio": beside / median,
                }
            )
    return rows


def in_words(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per row."""
    lines = []
    for row in rows:
        start = f"attention on a GPU, {row['pass']:8} {row['candidate']:6} ({row['case']}): "
        if row["seconds"] is None:
            lines.append(start + "unmeasured, there is no GPU")
            continue
        lines.append(
            start + f"{row['seconds'] * 1e3:.2f} ms, {row['flops_per_second'] / 1e12:.0f} TFLOP/s, "
            f"{100 * row['fraction_of_limit']:.0f}% of a dense product, {row['ratio']:.2f} of cuDNN"
        )
    return lines


def _candidates() -> dict[str, Callable[..., Any]]:
    return {
        "ours": lambda q, k, v: flash_attention(q, k, v, implementation="pallas_gpu")[0],
        "cuDNN": _cudnn,
        "XLA": lambda q, k, v: flash_attention(q, k, v, implementation="xla")[0],
    }


def _cudnn(q: Any, k: Any, v: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _pull(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's backward pass with its residuals; a pytree."""
    return jax.jit(lambda *xs: jax.vjp(function, *xs)[1])(*arguments)


def _limit() -> float:
    x = jnp.ones((LIMIT_WIDTH, LIMIT_WIDTH), jnp.bfloat16)
    timing = in_turns({"": timed(lambda x: x @ x, x)}, rounds=8)[""]
    return 2.0 * LIMIT_WIDTH**3 / timing.best
