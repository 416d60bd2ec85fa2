# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of ours beside cuDNN's in JAX, forward and with backward.

`bench kernels` measures the same functions in turns; see `experiments/bench/kernels.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.accelerator.candidates import candidate, with_gradients
from experiments.bench.accelerator.work import BenchWork, run_part
from pallas_kernels import OPERATIONS, flash_attention


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCase:
    """Sizes of causal attention."""

    batch: int
    length: int
    heads: int
    key_heads: int
    width: int
    window: int | None = None

    @property
    def words(self) -> str:
        """Sizes for the table."""
        window = "" if self.window is None else f", window {self.window}"
        heads = f"{self.heads} of {self.key_heads} heads of {self.width}"
        return f"{self.batch} x {self.length}, {heads}{window}"

    @property
    def flops(self) -> float:
        """Operations of the forward pass over the visible pairs."""
        reach = self.length if self.window is None else self.window
        pairs = self.length * reach - reach * reach / 2.0
        return 4.0 * self.batch * self.heads * pairs * self.width

    def draw(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Return q, k, v and the cotangent of the output."""
        counts = self.heads, self.key_heads, self.key_heads, self.heads
        keys = jax.random.split(key, 4)
        return tuple(
            jax.random.normal(k, (self.batch, self.length, n, self.width), jnp.bfloat16)
            for k, n in zip(keys, counts, strict=True)
        )


CASES = (
    AttentionCase(batch=4, length=4096, heads=16, key_heads=16, width=128),
    AttentionCase(batch=1, length=16384, heads=32, key_heads=4, width=128),
    AttentionCase(batch=2, length=8192, heads=32, key_heads=8, width=64),
    AttentionCase(batch=4, length=4096, heads=16, key_heads=16, width=128, window=1024),
    AttentionCase(batch=2, length=4096, heads=16, key_heads=8, width=256),
)
TINY = (AttentionCase(batch=1, length=256, heads=4, key_heads=2, width=64),)
BACKWARD = 3.5
"""Products of both passes over those of the forward pass."""


def attention(work: BenchWork) -> None:
    """Emit the rows of every implementation that runs here, and of cuDNN's."""
    implementations = [
        name
        for name in OPERATIONS["flash_attention"].runnable()
        if name not in ("reference", "xla") or work.is_tiny
    ]
    for case in TINY if work.is_tiny else CASES:
        functions: dict[str, Callable[..., Any]] = {"default": functools.partial(ours, case, None)}
        functions |= {name: functools.partial(ours, case, name) for name in implementations}
        if jax.default_backend() == "gpu":
            functions["jax.nn with cuDNN"] = functools.partial(by_cudnn, case)
        for name, function in functions.items():
            run = functools.partial(_without_cotangent, function)
            candidate(work, f"attention {case.words}", name, run, case.draw, flops=case.flops)
            candidate(
                work,
                f"attention {case.words}, with backward",
                name,
                with_gradients(function, 3),
                case.draw,
                flops=BACKWARD * case.flops,
            )


def _without_cotangent(function: Callable[..., Any], q: Any, k: Any, v: Any, _: Any) -> Any:
    return function(q, k, v)


def ours(case: AttentionCase, implementation: Any, q: Any, k: Any, v: Any) -> Any:
    """Return attention by an implementation of this package."""
    return flash_attention(q, k, v, window=case.window, implementation=implementation)[0]


def by_cudnn(case: AttentionCase, q: Any, k: Any, v: Any) -> Any:
    """Return attention by cuDNN, through `jax.nn`."""
    window = None if case.window is None else (case.window - 1, 0)
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn", local_window_size=window
        )


if __name__ == "__main__":
    run_part(attention)
