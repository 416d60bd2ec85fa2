# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`bench blocks`: the sizes of blocks that are fastest on this device, written into the table.

For the products of the presets' layers, forward and backward: from the sizes that a kernel's rule
says, each of them is halved and doubled as long as that is faster by more than the measurements
scatter (`MARGIN`). Candidates take turns, medians count, numbers are random. A kernel is not told
what it runs for: it asks `pallas_kernels.block_sizes`, and what it asks is what is measured.

    python -m experiments.bench blocks
    python -m experiments.bench blocks --presets olmoe_1b_7b --operations grouped_matmul

The result is `pallas_kernels/measured_block_sizes.py`, which holds other devices' as well. Without
a device that has kernels there is nothing to measure: it says so.

To add an operation: a line in `WORKLOADS`.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.bench.measure import in_turns, timed
from experiments.bench.operands import PAIRS, rounded
from experiments.bench.step import BenchRunConfig
from jaxmoe.models.presets import PRESETS
from pallas_kernels import (
    OPERATIONS,
    QuantizedArray,
    grouped_matmul,
    grouped_outer,
    measured_block_sizes,
    quantized_matmul,
)
from pallas_kernels.backend import Implementation, device_kind
from pallas_kernels.block_sizes import Asked, trial
from pallas_kernels.block_sizes import in_words as _name

MARGIN = 0.02
"""By so much of its time must a candidate be faster to be taken."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockBenchConfig:
    """The fastest sizes of blocks on the device at hand."""

    run: BenchRunConfig = BenchRunConfig()
    """Where the numbers go."""
    presets: tuple[str, ...] = ("tiny", "olmoe_1b_7b", "qwen3_30b_a3b", "mixtral_8x7b")
    """Models whose layers are measured."""
    operations: tuple[str, ...] = (
        *("quantized_matmul", "quantized_matmul_d_rows"),
        *("grouped_matmul", "grouped_matmul_d_rows", "grouped_outer"),
    )
    """Kernels that are measured; one that has no sizes to choose is passed over."""
    tokens: tuple[int, ...] = (32, 8192)
    """Rows of a product; a grouped one has as many times top_k."""
    pairs: tuple[str, ...] = ("w8a8", "w4a8", "w4a16", "fp8")
    """Bits of weights and activations of quantised products."""
    steps: int = 4
    """Halvings and doublings one after another, at most."""
    rounds: int = 5
    """Runs of each candidate that count."""
    file: str | None = None
    """Where the table goes; None: into the package, where kernels read it."""

    def __post_init__(self):
        for field in ("steps", "rounds"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if min(self.tokens, default=1) < 1:
            raise ValueError(f"tokens={self.tokens} must be at least 1")
        for field, known in (("presets", PRESETS), ("operations", WORKLOADS), ("pairs", PAIRS)):
            for name in getattr(self, field):
                if name not in known:
                    raise ValueError(f"{field}: there is no {name!r}: choose {', '.join(known)}")


class Workload(NamedTuple):
    """One product."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]


def bench_blocks(config: BlockBenchConfig) -> dict[str, Any]:
    """Measures, writes the table; the numbers of summary.json.

    Args:
        config: What is measured.

    Raises:
        ValueError: No kernel runs here, none asks for sizes, or the table cannot be written.
    """
    rows: list[dict[str, Any]] = []
    passed_over: dict[str, str] = {}
    for operation in config.operations:
        seen: set[str] = set()
        implementation = _kernels(operation)
        for workload in WORKLOADS[operation](config, implementation):
            asked = _asked(operation, workload)
            if asked is None:
                passed_over[operation] = f"{implementation} asks for no block sizes"
            elif asked.bucket not in seen:
                seen.add(asked.bucket)
                rows.append(_fastest(operation, asked, workload, config))
    if not rows:
        why = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
        raise ValueError(f"operations: there is nothing to measure ({why}): choose others")
    path = pathlib.Path(config.file or measured_block_sizes.__file__)
    _write(path, table_with(measured_block_sizes.BLOCK_SIZES, device_kind(), rows))
    return {"device": device_kind(), "file": str(path), "rows": rows, "passed_over": passed_over}


def in_words(summary: dict[str, Any]) -> str:
    """The numbers as a table."""
    lines = [f"block sizes on {summary['device']}, written to {summary['file']}"]
    for row in summary["rows"]:
        lines.append(
            f"{row['operation']:24}{row['bucket']:60}{_name(row['sizes']):28}"
            f"{row['seconds'] * 1e3:.3f} ms, by rule ({_name(row['default'])})"
            f" {row['default_seconds'] * 1e3:.3f} ms"
        )
    lines += [f"{name}: passed over, {why}" for name, why in summary["passed_over"].items()]
    return "\n".join(lines)


def table_with(
    table: measured_block_sizes.Table, kind: str, rows: list[dict[str, Any]]
) -> dict[str, dict[str, dict[str, str]]]:
    """The table with the rows of one kind of device added, or in place of those that were there.

    Args:
        table: As it is.
        kind: Of the device.
        rows: As in summary.json.
    """
    new = {name: {k: dict(b) for k, b in kinds.items()} for name, kinds in table.items()}
    for row in rows:
        buckets = new.setdefault(row["operation"], {}).setdefault(kind, {})
        buckets[row["bucket"]] = _name(row["sizes"])
    return new


def neighbours(sizes: Mapping[str, int], asked: Asked) -> list[dict[str, int]]:
    """The sizes with one of them halved or doubled, as far as they fit.

    Args:
        sizes: Where to start.
        asked: By the kernel.
    """
    found = []
    for name, size in sizes.items():
        for other in (size // 2, size * 2):
            candidate = {**sizes, name: other}
            if other > 0 and asked.fits(candidate):
                found.append(candidate)
    return found


def _fastest(
    operation: str, asked: Asked, workload: Workload, config: BlockBenchConfig
) -> dict[str, Any]:
    """A row of summary.json: the best sizes on a walk from the rule's."""
    best, seconds = dict(asked.default), {}
    for _ in range(config.steps):
        tried = [best, *(n for n in neighbours(best, asked) if _name(n) not in seconds)]
        runs = {_name(sizes): _run(operation, sizes, workload) for sizes in tried}
        timings = in_turns(runs, rounds=config.rounds)
        # Those of one turn are compared with one another alone.
        medians = {name: timing.median for name, timing in timings.items()}
        seconds.update(medians)
        fastest = min(tried, key=lambda sizes: medians[_name(sizes)])
        if fastest is best or medians[_name(fastest)] > (1.0 - MARGIN) * medians[_name(best)]:
            break
        best = fastest
    return {
        "operation": operation,
        "bucket": asked.bucket,
        "sizes": best,
        "seconds": seconds[_name(best)],
        "default": dict(asked.default),
        "default_seconds": seconds[_name(asked.default)],
        "candidates": len(seconds),
    }


def _run(operation: str, sizes: Mapping[str, int], workload: Workload) -> Callable[[], float]:
    with trial(operation, sizes):
        # A function of its own for each candidate: JAX would give the first one's program to all.
        return timed(lambda *arguments: workload.call(*arguments), *workload.arguments)


def _asked(operation: str, workload: Workload) -> Asked | None:
    """What the kernel asks; None where it does not."""
    with trial(operation, {}) as asked:
        jax.eval_shape(lambda *arguments: workload.call(*arguments), *workload.arguments)
    return asked[0] if asked else None


def _kernels(operation: str) -> Implementation:
    """The kernels that run here."""
    table = OPERATIONS[operation.removesuffix("_d_rows")]
    for name in table.runnable():
        if name.startswith("pallas"):
            return name
    raise ValueError(
        f"bench blocks: no kernel of {operation} runs on {device_kind()!r}, and other"
        " implementations have no blocks: run it on a GPU or TPU"
    )


def _write(path: pathlib.Path, table: Mapping[str, Any]) -> None:
    """The file as it was, up to the table; then the table."""
    start = "BLOCK_SIZES: Table = "
    source = pathlib.Path(measured_block_sizes.__file__).read_text(encoding="utf-8")
    lines = ["{"]
    for operation, kinds in sorted(table.items()):
        lines.append(f'    "{operation}": {{')
        for kind, buckets in sorted(kinds.items()):
            lines.append(f'        "{kind}": {{')
            lines += [
                f'            "{name}": "{sizes}",' for name, sizes in sorted(buckets.items())
            ]
            lines.append("        },")
        lines.append("    },")
    lines.append("}")
    text = "\n".join(lines) if table else "{}"
    try:
        path.write_text(source[: source.index(start)] + start + text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"file={str(path)!r} cannot be written: {error}") from error


# What is measured.


def _layers(config: BlockBenchConfig) -> Iterator[tuple[Any, int, int]]:
    """(mixture, k, n) of the two products of an expert, gate and up together."""
    for preset in config.presets:
        model = PRESETS[preset]()
        assert model.moe is not None
        yield model.moe, model.embed_dim, 2 * model.moe.expert_dim
        yield model.moe, model.moe.expert_dim, model.embed_dim


def _numbers(index: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(index), shape, jnp.bfloat16)


def _quantised(config: BlockBenchConfig, implementation: Implementation) -> Iterator[Workload]:
    def call(x: Any, w: Any) -> Any:
        return quantized_matmul(x, w, implementation=implementation, out_dtype=jnp.bfloat16)

    for (_, k, n), m, pair in itertools.product(_layers(config), config.tokens, config.pairs):
        left, right, _ = PAIRS[pair]
        x, w = rounded(_numbers(0, m, k), left, -1), rounded(_numbers(1, k, n), right, -2)
        yield Workload(call, (x, w))


def _quantised_d_rows(
    config: BlockBenchConfig, implementation: Implementation
) -> Iterator[Workload]:
    def call(x: Any, w: Any, d_out: Any) -> Any:
        def product(x: Any) -> Any:
            return quantized_matmul(x, w, implementation=implementation)

        return jax.vjp(product, x)[1](d_out)[0]

    for forward in _quantised(config, implementation):
        x, w = forward.arguments
        if not isinstance(x, QuantizedArray):
            yield Workload(call, (x, w, _numbers(2, x.shape[0], w.shape[1])))


def _grouped(config: BlockBenchConfig, implementation: Implementation) -> Iterator[Workload]:
    def call(rows: Any, weights: Any, sizes: Any) -> Any:
        return grouped_matmul(rows, weights, sizes, implementation=implementation)

    for moe, k, n, tokens in _grouped_layers(config):
        rows, sizes = _numbers(0, tokens * moe.top_k, k), _even(moe, tokens)
        yield Workload(call, (rows, _numbers(1, moe.num_experts, k, n), sizes))


def _grouped_d_rows(config: BlockBenchConfig, implementation: Implementation) -> Iterator[Workload]:
    def call(rows: Any, weights: Any, sizes: Any, d_out: Any) -> Any:
        def product(rows: Any) -> Any:
            return grouped_matmul(rows, weights, sizes, implementation=implementation)

        return jax.vjp(product, rows)[1](d_out)[0]

    for forward in _grouped(config, implementation):
        rows, weights, _ = forward.arguments
        d_out = _numbers(2, rows.shape[0], weights.shape[2])
        yield Workload(call, (*forward.arguments, d_out))


def _outer(config: BlockBenchConfig, implementation: Implementation) -> Iterator[Workload]:
    def call(rows: Any, others: Any, sizes: Any) -> Any:
        return grouped_outer(rows, others, sizes, implementation=implementation)

    for moe, k, n, tokens in _grouped_layers(config):
        length = tokens * moe.top_k
        yield Workload(call, (_numbers(0, length, k), _numbers(1, length, n), _even(moe, tokens)))


def _grouped_layers(config: BlockBenchConfig) -> Iterator[tuple[Any, int, int, int]]:
    for (moe, k, n), tokens in itertools.product(_layers(config), config.tokens):
        yield moe, k, n, tokens


def _even(moe: Any, tokens: int) -> Any:
    """Nearly as many rows for each expert: all tokens' rows."""
    rows, experts = tokens * moe.top_k, moe.num_experts
    return jnp.asarray([rows // experts + (e < rows % experts) for e in range(experts)], jnp.int32)


WORKLOADS: dict[str, Callable[[BlockBenchConfig, Implementation], Iterator[Workload]]] = {
    "quantized_matmul": _quantised,
    "quantized_matmul_d_rows": _quantised_d_rows,
    "grouped_matmul": _grouped,
    "grouped_matmul_d_rows": _grouped_d_rows,
    "grouped_outer": _outer,
}
"""By the name under which the kernel asks for sizes."""
