# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures operations beside libraries and measured limits, both passes (`bench kernels`).

    grouped_matmul, grouped_swiglu   beside the dense product of as many rows, by load of the groups
    flash_attention                  beside jax.nn.dot_product_attention, with temporary memory
    selective_scan, state_space_dual beside their references, one token after the other
    attention on a GPU               beside cuDNN, in bfloat16: accelerator/attention.py
    products of few bits, of groups  beside dense ones and libraries: products.py

The other rows are float32. Candidates take turns; a speed is the median's, the limit the rate of a
large dense product. Rows of attention on a GPU count the products of the visible half: 2 B N S^2 H
forward, two and a half times that backward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import products as bench_products
from experiments.bench.accelerator import attention as gpu_attention
from experiments.bench.measure import in_turns, matmul_rate, time_call, with_gradients
from experiments.bench.operands import loads
from experiments.bench.step import BenchRunConfig
from pallas_kernels import (
    flash_attention,
    grouped_matmul,
    grouped_swiglu,
    selective_scan,
    state_space_dual,
)
from pallas_kernels.backend import Implementation

LONG = gpu_attention.AttentionCase(batch=4, length=8192, heads=16, key_heads=16, width=128)
"""Attention on a GPU."""
PRODUCTS = {"forward": 1.0, "backward": gpu_attention.BACKWARD - 1.0}
"""Products of a pass of attention over those of the forward pass."""
LIMIT_WIDTH = 8192
"""Width of the dense product that limits attention on a GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelBenchConfig:
    """Operations of this package beside libraries and the measured limit."""

    run: BenchRunConfig = BenchRunConfig()
    """Output directory."""
    rounds: int = 7
    """Counted runs per candidate."""
    rows: int = 8192
    """Rows of a grouped product."""
    groups: int = 16
    """Groups that share the rows."""
    width: int = 256
    """Width of a row."""
    hidden: int = 512
    """Hidden width of a group's SwiGLU, columns of a group's matrix."""
    lengths: tuple[int, ...] = (512, 2048)
    """Sequence lengths of attention and scans, 4096 tokens in all, 4 heads of 64."""
    memory_lengths: tuple[int, ...] = (2048, 4096, 8192)
    """Sequence lengths at which temporary memory is compared."""
    implementation: Implementation | None = None
    """Implementation of the operations; None picks the fastest that runs here."""

    def __post_init__(self):
        for field in ("rounds", "rows", "groups", "width", "hidden"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if min((*self.lengths, *self.memory_lengths), default=1) < 1:
            raise ValueError("lengths and memory_lengths must be at least 1")


def bench_kernels(config: KernelBenchConfig) -> dict[str, Any]:
    """Measure, and return the numbers of summary.json."""
    return {
        "matmul_flops_per_second": matmul_rate(),
        "rows": [*_group(config), *_attention(config), *_scans(config)],
        "attention_temporary_bytes": _attention_memory(config),
        "gpu_attention": _gpu_attention(config.rounds),
        **bench_products.products(config.rounds, config.implementation),
    }


def in_words(summary: dict[str, Any]) -> str:
    """Return the numbers as a table."""
    lines = [
        f"dense product {summary['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s, float32",
        f"{'operation':16}{'case':14}{'ours':>10}{'beside':>10}   ratio of speeds",
    ]
    for row in summary["rows"]:
        lines.append(
            f"{row['operation']:16}{row['case']:14}{row['seconds'] * 1e3:8.1f}ms"
            f"{row['beside_seconds'] * 1e3:8.1f}ms   {row['ratio']:.2f} of {row['beside']}"
        )
    for row in summary["attention_temporary_bytes"]:
        lines.append(
            f"attention, temporary memory at S={row['length']}: {row['ours'] / 1e6:.0f} MB,"
            f" jax.nn {row['jax_nn'] / 1e6:.0f} MB"
        )
    lines += _gpu_in_words(summary["gpu_attention"])
    return "\n".join([*lines, *bench_products.in_words(summary)])


def _group(config: KernelBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield both grouped operations under every load, beside the dense product of as many rows."""
    width = config.width
    hidden = config.hidden
    groups = config.groups
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (config.rows, width))
    gate_up = 0.1 * jax.random.normal(keys[1], (groups, width, 2, hidden))
    down = 0.1 * jax.random.normal(keys[2], (groups, hidden, width))
    weights = gate_up[:, :, 0]
    implementation = config.implementation

    def dense_swiglu(rows: Any, gate_up: Any, down: Any) -> Any:
        joined = rows @ gate_up[0].reshape(width, 2 * hidden)
        return (jax.nn.silu(joined[:, :hidden]) * joined[:, hidden:]) @ down[0]

    for case, group_sizes in loads(config.rows, groups).items():
        sizes = jnp.asarray(group_sizes)
        products = {
            "ours": lambda r, w, sizes=sizes: grouped_matmul(
                r, w, sizes, implementation=implementation
            ),
            "dense": lambda r, w: r @ w[0],
        }
        yield _row("grouped_matmul", case, products, (rows, weights), config.rounds)
        experts = {
            "ours": lambda r, u, d, sizes=sizes: grouped_swiglu(
                r, u, d, sizes, implementation=implementation
            ),
            "dense": dense_swiglu,
        }
        yield _row("grouped_swiglu", case, experts, (rows, gate_up, down), config.rounds)


def _attention(config: KernelBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield flash_attention beside jax.nn, causal."""
    for length in config.lengths:
        batch = max(1, 4096 // length)
        keys = jax.random.split(jax.random.key(1), 3)
        arrays = tuple(jax.random.normal(key, (batch, length, 4, 64)) for key in keys)
        case = f"{batch} x {length}"
        yield _row("flash_attention", case, _attentions(config), arrays, config.rounds)


def _attentions(config: KernelBenchConfig) -> dict[str, Callable[..., Any]]:
    return {
        "ours": lambda q, k, v: flash_attention(q, k, v, implementation=config.implementation)[0],
        "jax.nn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
    }


def _gpu_attention(rounds: int) -> list[dict[str, Any]]:
    """Return a row per candidate and pass, measured where there is a GPU."""
    candidates = {
        "ours": functools.partial(gpu_attention.ours, LONG, "pallas_gpu"),
        "cuDNN": functools.partial(gpu_attention.by_cudnn, LONG),
        "XLA": functools.partial(gpu_attention.ours, LONG, "xla"),
    }
    if jax.default_backend() == "gpu":
        return _gpu_rows(candidates, LONG, rounds, _dense_rate())
    return [
        {"pass": name, "candidate": candidate, "case": LONG.words, "seconds": None}
        for name in PRODUCTS
        for candidate in candidates
    ]


def _gpu_rows(
    candidates: Mapping[str, Callable[..., Any]],
    case: gpu_attention.AttentionCase,
    rounds: int,
    limit: float,
) -> list[dict[str, Any]]:
    """Return rows with seconds, FLOP/s, the fraction of the limit, and the ratio to cuDNN's speed.

    Args:
        candidates: Functions of q, k and v; ratios compare with the second.
        case: Sizes of the operands.
        rounds: Counted runs per candidate.
        limit: Measured limit in FLOP/s.
    """
    q, k, v, d_out = case.draw(jax.random.key(0))
    forward = {name: time_call(f, q, k, v) for name, f in candidates.items()}
    pulls = {
        name: jax.jit(lambda *xs, f=f: jax.vjp(f, *xs)[1])(q, k, v)
        for name, f in candidates.items()
    }
    backward = {
        name: time_call(lambda pull, x: pull(x), pull, d_out) for name, pull in pulls.items()
    }
    rows = []
    for name, runs in (("forward", forward), ("backward", backward)):
        seconds = {c: timing.median for c, timing in in_turns(runs, rounds=rounds).items()}
        beside = list(seconds.values())[1]
        for candidate, median in seconds.items():
            rate = PRODUCTS[name] * case.flops / median
            rows.append(
                {
                    "pass": name,
                    "candidate": candidate,
                    "case": case.words,
                    "seconds": median,
                    "flops_per_second": rate,
                    "fraction_of_limit": rate / limit,
                    "ratio": beside / median,
                }
            )
    return rows


def _gpu_in_words(rows: list[dict[str, Any]]) -> list[str]:
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


def _dense_rate() -> float:
    """Return the FLOP/s of a large dense product in bfloat16."""
    x = jnp.ones((LIMIT_WIDTH, LIMIT_WIDTH), jnp.bfloat16)
    timing = in_turns({"": time_call(lambda x: x @ x, x)}, rounds=8)[""]
    return 2.0 * LIMIT_WIDTH**3 / timing.best


def _scans(config: KernelBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield both scans beside their references: 16 and 64 numbers of state per channel."""
    operations = {"selective_scan": selective_scan, "state_space_dual": state_space_dual}
    for length in config.lengths:
        batch = max(1, 4096 // length)
        keys = jax.random.split(jax.random.key(2), 5)
        for name, operation in operations.items():
            channels, groups, decays = (
                ((256,), (16,), (256, 16)) if name == "selective_scan" else ((4, 64), (1, 64), (4,))
            )
            arrays = (
                jax.random.normal(keys[0], (batch, length, *channels)),
                jax.nn.softplus(jax.random.normal(keys[1], (batch, length, channels[0])) - 4.0),
                -jnp.exp(jax.random.normal(keys[2], decays)),
                *(jax.random.normal(key, (batch, length, *groups)) for key in keys[3:]),
            )
            candidates = {
                "ours": functools.partial(_outputs, operation, config.implementation),
                "reference": functools.partial(_outputs, operation, "reference"),
            }
            yield _row(name, f"{batch} x {length}", candidates, arrays, config.rounds)


def _outputs(
    operation: Callable[..., Any], implementation: Implementation | None, *arrays: Any
) -> Any:
    return operation(*arrays, implementation=implementation)[0]


def _attention_memory(config: KernelBenchConfig) -> list[dict[str, int]]:
    """Return temporary bytes of forward and backward by length, from the compiler."""
    table = []
    for length in config.memory_lengths:
        arrays = (jax.ShapeDtypeStruct((1, length, 4, 64), jnp.float32),) * 3
        sizes = {}
        for name, function in _attentions(config).items():
            memory = jax.jit(with_gradients(function)).lower(*arrays).compile().memory_analysis()
            sizes[name.replace(".", "_")] = 0 if memory is None else memory.temp_size_in_bytes
        table.append({"length": length, **sizes})
    return table


def _row(
    operation: str,
    case: str,
    candidates: dict[str, Callable[..., Any]],
    arguments: tuple[Any, ...],
    rounds: int,
) -> dict[str, Any]:
    """Return a row of two candidates that take turns, forward and backward."""
    runs = {name: time_call(with_gradients(f), *arguments) for name, f in candidates.items()}
    timings = in_turns(runs, rounds=rounds)
    ours, (beside, peer) = timings["ours"], next(t for t in timings.items() if t[0] != "ours")
    return {
        "operation": operation,
        "case": case,
        "seconds": ours.median,
        "beside": beside,
        "beside_seconds": peer.median,
        "ratio": peer.median / ours.median,
    }
