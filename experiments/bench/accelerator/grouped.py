# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products of experts: ours in each implementation, forward and with gradients, in bfloat16."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.accelerator.candidates import candidate, with_gradients
from experiments.bench.accelerator.work import BenchWork, run_part
from pallas_kernels import OPERATIONS, grouped_matmul, grouped_swiglu


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupedCase:
    """Sizes of a grouped product."""

    label: str
    rows: int
    width: int
    hidden: int
    groups: int
    is_trained: bool = True

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each group: skewed, equal for all who ask."""
        share = np.exp(np.random.default_rng(0).normal(0, 0.6, self.groups))
        sizes = np.floor(share / share.sum() * self.rows).astype(np.int32)
        sizes[0] += self.rows - sizes.sum()
        return sizes


CASES = (
    GroupedCase(label="OLMoE", rows=131072, width=2048, hidden=1024, groups=64),
    GroupedCase(label="Qwen3", rows=131072, width=2048, hidden=768, groups=128),
    GroupedCase(label="Mixtral", rows=32768, width=4096, hidden=14336, groups=8, is_trained=False),
    GroupedCase(label="decoding", rows=512, width=2048, hidden=1024, groups=64, is_trained=False),
)
TINY = (GroupedCase(label="tiny", rows=256, width=128, hidden=128, groups=4),)


def emit_grouped(work: BenchWork) -> None:
    """Emit the rows of grouped products, their gradients, and whole expert layers."""
    for case in TINY if work.is_tiny else CASES:
        flops = 2.0 * case.rows * case.width * case.hidden
        for name in _implementations("grouped_matmul", case):
            product = functools.partial(_product, name)
            label = f"grouped product {case.label}"
            draw = functools.partial(_draw_product, case)
            candidate(work, label, name, functools.partial(_first, product, 3), draw, flops=flops)
            if case.is_trained:
                gradients = with_gradients(product, 2)
                candidate(work, f"{label}, gradients", name, gradients, draw, flops=2.0 * flops)
        if not case.is_trained:
            continue
        for name in _implementations("grouped_swiglu", case):
            layer = functools.partial(_layer, name)
            label = f"experts {case.label}"
            draw = functools.partial(_draw_layer, case)
            run = functools.partial(_first, layer, 4)
            candidate(work, label, name, run, draw, flops=3.0 * flops, calls=4)
            candidate(
                work,
                f"{label}, with backward",
                name,
                with_gradients(layer, 3),
                draw,
                flops=9.0 * flops,
                calls=4,
            )


def _implementations(operation: str, case: GroupedCase) -> list[str]:
    names = [name for name in OPERATIONS[operation].runnable() if name != "reference"]
    # Beside a kernel XLA's loop over groups is slow enough to be shown for one case alone.
    return names if case.label in ("OLMoE", "tiny") or len(names) == 1 else names[:-1]


def _product(implementation: Any, rows: Any, weights: Any, sizes: Any) -> Any:
    return grouped_matmul(rows, weights, sizes, implementation=implementation)


def _layer(implementation: Any, rows: Any, gate_up: Any, down: Any, sizes: Any) -> Any:
    return grouped_swiglu(rows, gate_up, down, sizes, implementation=implementation)


def _first(function: Any, count: int, *arguments: Any) -> Any:
    """Return the value of a function of the first arguments."""
    return function(*arguments[:count])


def _draw_product(case: GroupedCase, key: jax.Array) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, 3)
    return (
        _normal(keys[0], 1.0, case.rows, case.width),
        _normal(keys[1], case.width**-0.5, case.groups, case.width, case.hidden),
        jnp.asarray(case.sizes),
        _normal(keys[2], 1.0, case.rows, case.hidden),
    )


def _draw_layer(case: GroupedCase, key: jax.Array) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, 4)
    return (
        _normal(keys[0], 1.0, case.rows, case.width),
        _normal(keys[1], case.width**-0.5, case.groups, case.width, 2, case.hidden),
        _normal(keys[2], case.hidden**-0.5, case.groups, case.hidden, case.width),
        jnp.asarray(case.sizes),
        _normal(keys[3], 1.0, case.rows, case.width),
    )


def _normal(key: jax.Array, scale: float, *shape: int) -> jax.Array:
    # Drawn flat: five dimensions take XLA many times as long to compile.
    flat = jax.random.normal(key, (int(np.prod(shape)),), jnp.bfloat16)
    return (flat * scale).astype(jnp.bfloat16).reshape(shape)


if __name__ == "__main__":
    run_part(emit_grouped)
