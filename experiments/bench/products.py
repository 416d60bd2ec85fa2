# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures products of few bits, and of groups of rows, beside dense ones, libraries and limits.

    quantized_matmul   w8a8, w4a8, w4a16, fp8, mixed     beside the dense product of as many values
    grouped_matmul     as it is, w8a8, w4a16, fp8        beside the dense product of as many rows,
                       forward and both gradients        jax.lax.ragged_dot, torch._grouped_mm

On a GPU or TPU at the widths of OLMoE and Qwen3 in bfloat16, with the kernels for it and with XLA;
on a CPU at small ones in float32. Operands are random and rounded beforehand, except for `mixed`,
which rounds its activations in the run; an expert's load is even or Zipf's. Candidates take turns,
medians count. A product of few rows is repeated with as many matrices, so that none stays in a
cache, and the start of a program is shared by all.

The limit of a product is the longer of two times: reading and writing all operands at the speed of
memory, and its operations at the rate of a large dense product of the same bits. Both are measured
in the same run. A candidate that cannot run here is a row with the reason.

To add a candidate: a line in `PAIRS` of `experiments/bench/operands.py`, or in
`_grouped_candidates` of `experiments/bench/products.py`. To add a target: a line in `TARGETS` of
`experiments/bench/products.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.accelerator.torch_kernels import timed_pass
from experiments.bench.measure import in_turns, matmul_rate, memory_rate, time_call
from experiments.bench.operands import PAIRS, loads, round_operand
from jaxmoe.models.presets import PRESETS
from pallas_kernels import OPERATIONS, grouped_matmul, quantize_mixed, quantized_matmul
from pallas_kernels.backend import Implementation, platform

NO_GPU = "there is no GPU"
FEW = 32
"""Rows up to which the time of a product is that of reading its matrix."""

TARGETS: dict[tuple[str, str, str], float] = {
    ("gpu", "grouped_matmul", "ours"): 0.7,
    ("gpu", "quantized_matmul many", "fp8"): 1.5,
    ("gpu", "quantized_matmul few", "w4a16"): 2.5,
    ("gpu", "quantized_matmul few", "mixed"): 1.5,
    ("cpu", "quantized_matmul many", "w8a8"): 0.9,
}
"""Target speeds, in units of the dense product's: of a Hopper GPU, and of a CPU."""


class ProductSizes(NamedTuple):
    """Sizes of one model's products."""

    name: str
    width: int
    hidden: int
    groups: int
    few: tuple[int, ...]
    """Rows of products with one matrix."""
    many: tuple[int, ...]
    grouped: int
    """Rows of grouped products."""
    repeats: int
    """Products, with as many matrices, of one measurement."""
    dtype: str


SMALL = ProductSizes("small", 512, 512, 8, (32,), (1024,), 1024, 1, "float32")


def accelerator_widths() -> tuple[ProductSizes, ...]:
    """Return the widths at which a GPU or TPU is measured."""
    models = {"OLMoE": PRESETS["olmoe_1b_7b"](), "Qwen3": PRESETS["qwen3_30b_a3b"]()}
    cases = []
    for name, model in models.items():
        assert model.moe is not None
        hidden = 2 * model.moe.expert_dim
        groups = model.moe.num_experts
        rows = ((1, 8, 32), (8192,), 131072)
        cases.append(ProductSizes(name, model.embed_dim, hidden, groups, *rows, 16, "bfloat16"))
    return tuple(cases)


class ProductLimits(NamedTuple):
    """Measured limits of the machine."""

    flops: Mapping[str, float]
    """Operations per second, by dtype."""
    memory: float
    """Bytes per second."""

    def seconds(self, flops: float, dtype: str, size: float) -> float:
        """Return the least time of so many operations and bytes."""
        return max(flops / self.flops[dtype], size / self.memory)


LOADS = ("even", "zipf")
GROUPED_PAIRS = ("w8a8", "w4a16", "fp8")


def products(rounds: int, implementation: Implementation | None = None) -> dict[str, Any]:
    """Measure, and return the numbers of summary.json.

    Args:
        rounds: Counted runs per candidate.
        implementation: Implementation of the products; None picks the kernels of the device, or
            XLA.
    """
    is_cpu = platform() == "cpu"
    limits = measured_limits("float32" if is_cpu else "bfloat16", is_large=not is_cpu)
    rows = []
    for sizes in (SMALL,) if is_cpu else accelerator_widths():
        rows += measure_model(sizes, limits, rounds, implementation)
    return {
        "product_limits": {**limits.flops, "memory": limits.memory},
        "products": rows + ([] if platform() == "gpu" else hopper_rows()),
    }


def measured_limits(dtype: str, *, is_large: bool) -> ProductLimits:
    """Return the limits of this machine.

    Args:
        dtype: Dtype of values that are not quantised.
        is_large: Whether to use sizes for a GPU or TPU.
    """
    shapes = ((8192, 8192, 8192),) if is_large else ()
    rates = {d: matmul_rate(jnp.dtype(d), shapes) for d in (dtype, "int8", "float8_e4m3fn")}
    # Products that a backend computes in more bits are limited by the rate of those.
    rates = {name: max(rate, rates[dtype]) for name, rate in rates.items()}
    return ProductLimits(rates, memory_rate(2**30 if is_large else 2**27))


def hopper_rows() -> list[dict[str, Any]]:
    """Return the rows that need a Hopper GPU."""
    return [
        _row(operation, "OLMoE and Qwen3", "all" if "grouped" in operation else "forward", name)
        | {"target": target, "reason": NO_GPU}
        for (device, operation, name), target in TARGETS.items()
        if device == "gpu"
    ]


def measure_model(
    sizes: ProductSizes,
    limits: ProductLimits,
    rounds: int,
    implementation: Implementation | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of one model's sizes.

    Args:
        sizes: Sizes of the operands.
        limits: Measured limits of the machine.
        rounds: Counted runs per candidate.
        implementation: Implementation of the products; see `products`.
    """
    rows = [
        *_quantised(sizes, limits, rounds, implementation),
        *_group(sizes, limits, rounds, implementation),
    ]
    for row in rows:
        key = (platform(), row["operation"], row["candidate"])
        row["target"] = TARGETS.get(key)
    return rows


def in_words(summary: dict[str, Any]) -> list[str]:
    """Return a line per limit and row."""
    *rates, (_, memory) = summary["product_limits"].items()
    limits = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates)
    lines = [f"limits: TFLOP/s {limits}; memory {memory / 1e9:.0f} GB/s"]
    for row in summary["products"]:
        start = f"{row['operation']:22}{row['case']:28}{row['pass']:10}{row['candidate']:14}"
        target = f" (to reach {row['target']})" if row.get("target") else ""
        if row["seconds"] is None:
            lines.append(f"{start}unmeasured, {row['reason']}{target}")
            continue
        lines.append(
            f"{start}{row['seconds'] * 1e3:9.3f} ms, {100 * row['fraction_of_limit']:.0f}% of the"
            f" limit, {row['ratio']:.2f} of dense{target}"
        )
    return lines


class _ProductCandidate(NamedTuple):
    """One way to compute a product."""

    run: Callable[[], float] | str
    """Function that returns the seconds of one run, or the reason why it cannot run."""
    dtype: str
    """Dtype that selects the limit of operations."""
    size: float = 0.0
    """Bytes of operands and result."""


def _quantised(
    sizes: ProductSizes,
    limits: ProductLimits,
    rounds: int,
    implementation_asked: Implementation | None,
) -> Iterator[dict[str, Any]]:
    k = sizes.width
    n = sizes.hidden
    for m in (*sizes.few, *sizes.many):
        keys = jax.random.split(jax.random.key(m), 1 + sizes.repeats)
        x = jax.random.normal(keys[0], (m, k)).astype(sizes.dtype)
        matrices = [jax.random.normal(key, (k, n)).astype(sizes.dtype) for key in keys[1:]]

        def one(multiply: Any, x: Any, matrices: Any, dtype: str, m: int = m) -> _ProductCandidate:
            def run(x: Any, matrices: Any) -> Any:
                return sum(multiply(x, w) for w in matrices)

            size = _bytes((x, matrices)) + len(matrices) * m * n * jnp.dtype(sizes.dtype).itemsize
            return _ProductCandidate(_time_call(run, x, matrices), dtype, size)

        candidates = {"dense": one(jnp.matmul, x, matrices, sizes.dtype)}
        for name, implementation in _implementations(
            "quantized_matmul", implementation_asked
        ).items():

            def multiply(x: Any, w: Any, implementation: Any = implementation) -> Any:
                return quantized_matmul(
                    x, w, implementation=implementation, out_dtype=jnp.dtype(sizes.dtype)
                )

            for pair, (lhs, rhs, dtype) in PAIRS.items():
                rounded_matrices = [round_operand(w, rhs, -2) for w in matrices]
                candidates[pair + name] = one(
                    multiply, round_operand(x, lhs, -1), rounded_matrices, dtype or sizes.dtype
                )
            mixed = _mix(x, matrices)
            candidates["mixed" + name] = one(multiply, x, mixed, "int8")
        operation = f"quantized_matmul {'few' if m <= FEW else 'many'}"
        case = f"{sizes.name} {m} x {k} x {n}"
        flops = 2.0 * m * k * n * sizes.repeats
        yield from _rows(operation, case, "forward", candidates, flops, limits, rounds)


def _group(
    sizes: ProductSizes,
    limits: ProductLimits,
    rounds: int,
    implementation_asked: Implementation | None,
) -> Iterator[dict[str, Any]]:
    r = sizes.grouped
    k = sizes.width
    n = sizes.hidden
    g = sizes.groups
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (r, k)).astype(sizes.dtype)
    weights = (jax.random.normal(keys[1], (g, k, n)) / 32).astype(sizes.dtype)
    d_out = jax.random.normal(keys[2], (r, n)).astype(sizes.dtype)
    by_load = loads(r, g)
    for load in LOADS:
        group_sizes = jnp.asarray(by_load[load])
        case = f"{sizes.name} {load} {r} x {k} x {n}"
        for name in ("forward", "d rows", "d weights"):
            candidates = _grouped_candidates(
                name, (rows, weights, d_out), group_sizes, sizes.dtype, implementation_asked
            )
            flops = 2.0 * r * k * n
            yield from _rows("grouped_matmul", case, name, candidates, flops, limits, rounds)


def _grouped_candidates(
    name: str,
    operands: tuple[Any, Any, Any],
    group_sizes: Any,
    dtype: str,
    implementation_asked: Any,
) -> dict[str, _ProductCandidate]:
    rows, weights, d_out = operands

    def one(multiply: Any, rows: Any, weights: Any, limit: str = dtype) -> _ProductCandidate:
        def run(rows: Any, weights: Any, d_out: Any) -> Any:
            if name == "forward":
                return multiply(rows, weights)
            of_rows = name == "d rows"
            function = (lambda a: multiply(a, weights)) if of_rows else lambda a: multiply(rows, a)
            return jax.vjp(function, rows if of_rows else weights)[1](d_out)[0]

        # Each pass reads two of rows, weights and d out, and writes an array like the third.
        return _ProductCandidate(
            _time_call(run, rows, weights, d_out), limit, _bytes((rows, weights, d_out))
        )

    # Dense product of as many rows with the first group's matrix.
    candidates = {"dense": one(jnp.matmul, rows, weights[0])}
    for suffix, implementation in _implementations("grouped_matmul", implementation_asked).items():

        def multiply(rows: Any, weights: Any, implementation: Any = implementation) -> Any:
            return grouped_matmul(
                rows, weights, group_sizes, implementation=implementation,
                out_dtype=jnp.dtype(dtype),
            )  # fmt: skip

        candidates["ours" + suffix] = one(multiply, rows, weights)
        for pair in GROUPED_PAIRS if name == "forward" else ():
            lhs, rhs, limit = PAIRS[pair]
            factors = round_operand(rows, lhs, -1), round_operand(weights, rhs, -2)
            candidates[pair + suffix] = one(multiply, *factors, limit or dtype)
    candidates["ragged_dot"] = one(
        lambda rows, weights: jax.lax.ragged_dot(rows, weights, group_sizes), rows, weights
    )
    theirs = timed_pass(name, rows.shape, weights.shape, np.asarray(group_sizes))
    candidates["torch"] = _ProductCandidate(theirs, dtype, _bytes(operands))
    return candidates


def _implementations(operation: str, implementation: Implementation | None) -> dict[str, Any]:
    """Return suffixes of candidate names with their implementations, kernels first."""
    runnable = OPERATIONS[operation].runnable()
    kernels = [name for name in runnable if name.startswith("pallas")]
    if implementation is not None or not kernels:
        return {"": implementation}
    return {"": kernels[0], ", xla": "xla"} if "xla" in runnable else {"": kernels[0]}


def _rows(
    operation: str,
    case: str,
    name: str,
    candidates: Mapping[str, _ProductCandidate],
    flops: float,
    limits: ProductLimits,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Yield a row per candidate, the dense product first."""
    runs = {
        c: function.run for c, function in candidates.items() if not isinstance(function.run, str)
    }
    medians = {c: timing.median for c, timing in in_turns(runs, rounds=rounds).items()}
    for candidate, function in candidates.items():
        row = _row(operation, case, name, candidate)
        if candidate not in medians:
            yield row | {"reason": function.run}
            continue
        limit = limits.seconds(flops, function.dtype, function.size)
        yield row | {
            "seconds": medians[candidate],
            "flops_per_second": flops / medians[candidate],
            "limit_seconds": limit,
            "fraction_of_limit": limit / medians[candidate],
            "ratio": medians["dense"] / medians[candidate],
        }


def _row(operation: str, case: str, name: str, candidate: str) -> dict[str, Any]:
    start = {"operation": operation, "case": case, "pass": name, "candidate": candidate}
    return start | {"seconds": None}


def _time_call(function: Callable[..., Any], *arguments: Any) -> Callable[[], float] | str:
    """Return the timed function, or the message with which kernel or compiler refuse it."""
    try:
        return time_call(function, *arguments)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return " ".join(str(error).split())[:200]


def _mix(x: Any, matrices: list[Any]) -> list[Any]:
    """Return weights with an eighth of the channels in 8 bits."""
    sample = x.astype(jnp.float32)
    size = min(128, x.shape[1])
    wide = max(1, x.shape[1] // size // 8)
    return [quantize_mixed(w, sample, block_size=size, num_wide=wide) for w in matrices]


def _bytes(tree: Any) -> float:
    """Return the bytes of all arrays, two int4 to a byte."""
    leaves = jax.tree.leaves(tree)
    return sum(x.size * (0.5 if x.dtype == jnp.int4 else x.dtype.itemsize) for x in leaves)
