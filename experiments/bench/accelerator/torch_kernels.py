# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's products, SDPA and _grouped_mm at the sizes of our kernels.

The passes of torch._grouped_mm, which the experts of transformers use, in bfloat16:

    forward    rows [R k] @ weights [G k n]         d rows   d out [R n] @ weights^T
    d weights  rows^T [k R] @ d out [R n], cut by group along R

`bench kernels` measures single passes beside ours; see `experiments/bench/products.py`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.bench.accelerator import attention, grouped
from experiments.bench.accelerator.torch_step import device_of, wait_for
from experiments.bench.accelerator.work import (
    FAILURES,
    BenchWork,
    emit,
    emit_failure,
    median_seconds,
    rates,
    run_part,
)
from jaxmoe.optional import MissingPackageError, require


def torch_kernels(work: BenchWork) -> None:
    """Emit the rows of PyTorch."""
    try:
        torch = require("torch", "hf")
    except MissingPackageError as error:
        emit_failure(error, case="PyTorch", name="PyTorch")
        return
    device = device_of(torch)
    size = 256 if work.is_tiny else 8192
    x, y = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    _time_call(torch, f"dense {size}^3", "PyTorch bfloat16", lambda: x @ y, flops=2.0 * size**3)
    count = (1 if work.is_tiny else 256) * 2**20
    source = torch.randn(count, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    _time_call(torch, "copy", "PyTorch copy", lambda: target.copy_(source), moved=4.0 * count)
    for case in attention.TINY if work.is_tiny else attention.CASES:
        if case.window is None:
            _attention(torch, device, case)
    for case in grouped.TINY if work.is_tiny else grouped.CASES:
        _group(torch, device, case)


def _attention(torch: Any, device: str, case: attention.AttentionCase) -> None:
    def draw(heads: int) -> Any:
        shape = case.batch, heads, case.length, case.width
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    q = draw(case.heads)
    k = draw(case.key_heads)
    v = draw(case.key_heads)
    cotangent = torch.randn_like(q)

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=case.heads != case.key_heads
        )

    label = f"attention {case.words}"
    with torch.no_grad():
        _time_call(torch, label, "PyTorch SDPA", forward, flops=case.flops)

    def both() -> Any:
        return torch.autograd.grad(forward(), (q, k, v), cotangent)

    flops = attention.BACKWARD * case.flops
    _time_call(torch, f"{label}, with backward", "PyTorch SDPA", both, flops=flops)


def timed_pass(
    name: str, rows: tuple[int, ...], weights: tuple[int, ...], group_sizes: np.ndarray
) -> Callable[[], float] | str:
    """Return a timed run of one pass of PyTorch's grouped product, or why it cannot run.

    Args:
        name: "forward", "d rows" or "d weights".
        rows: Shape [R k].
        weights: Shape [G k n].
        group_sizes: Group sizes [G], whose sum is R.
    """
    try:
        torch = require("torch", "hf")
    except MissingPackageError:
        return "PyTorch is not installed"
    if not torch.cuda.is_available():
        return "PyTorch has no GPU"
    if not hasattr(torch, "_grouped_mm"):
        return f"PyTorch {torch.__version__} has no _grouped_mm"
    call = _grouped_passes(torch, "cuda", rows, weights, group_sizes)[name]

    def run() -> float:
        wait_for(torch)
        started = time.perf_counter()
        call()
        wait_for(torch)
        return time.perf_counter() - started

    return run


def _grouped_passes(
    torch: Any,
    device: str,
    rows: tuple[int, ...],
    weights: tuple[int, ...],
    group_sizes: np.ndarray,
) -> dict[str, Callable[[], Any]]:
    """Return the passes of the grouped product on drawn operands, by name."""

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    ends = torch.tensor(np.cumsum(group_sizes), device=device, dtype=torch.int32)
    x = draw(*rows)
    d_out = draw(rows[0], weights[2])
    w = draw(*weights) * weights[1] ** -0.5
    factors = {
        "forward": (x, w),
        "d rows": (d_out, w.transpose(-2, -1)),
        "d weights": (x.transpose(0, 1), d_out),
    }
    return {
        name: functools.partial(torch._grouped_mm, *pair, offs=ends)
        for name, pair in factors.items()
    }


def _group(torch: Any, device: str, case: grouped.GroupedCase) -> None:
    weights = case.groups, case.width, case.hidden
    passes = _grouped_passes(torch, device, (case.rows, case.width), weights, case.sizes)
    flops = 2.0 * case.rows * case.width * case.hidden

    def gradients() -> Any:
        passes["d rows"]()
        return passes["d weights"]()

    label = f"grouped product {case.label}"
    _time_call(torch, label, "PyTorch _grouped_mm", passes["forward"], flops=flops)
    if case.is_trained:
        label += ", gradients"
        _time_call(torch, label, "PyTorch _grouped_mm", gradients, flops=2.0 * flops)


def _time_call(
    torch: Any,
    case: str,
    name: str,
    call: Callable[[], Any],
    *,
    flops: float | None = None,
    moved: float | None = None,
    calls: int = 8,
) -> None:
    row: dict[str, Any] = {"case": case, "name": name}

    def run(_: int) -> None:
        for _ in range(calls):
            call()
        wait_for(torch)

    try:
        row |= rates(median_seconds(run) / calls, flops=flops, moved=moved)
    except FAILURES as error:
        emit_failure(error, **row)
    else:
        emit(**row)


if __name__ == "__main__":
    run_part(torch_kernels)
