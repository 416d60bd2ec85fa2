# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures PyTorch's grouped product on a GPU: torch._grouped_mm in bfloat16, with both gradients.

    forward    rows [R k] @ weights [G k n]         d rows   d out [R n] @ weights^T
    d weights  rows^T [k R] @ d out [R n], cut by group along R

It is the private function that the experts of transformers use. Without PyTorch with CUDA the
reason is returned instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def grouped(
    name: str, rows: tuple[int, ...], weights: tuple[int, ...], group_sizes: np.ndarray
) -> Callable[[], float] | str:
    """Return a timed run of one pass, or the reason why it cannot run.

    Args:
        name: "forward", "d rows" or "d weights".
        rows: Shape [R k].
        weights: Shape [G k n].
        group_sizes: Group sizes [G], whose sum is R.
    """
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return "PyTorch has no GPU"
    if not hasattr(torch, "_grouped_mm"):
        return f"PyTorch {torch.__version__} has no _grouped_mm"

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    ends = torch.tensor(np.cumsum(group_sizes), device="cuda", dtype=torch.int32)
    d_out = normal(rows[0], weights[2])
    if name == "forward":
        factors = normal(*rows), normal(*weights)
    elif name == "d rows":
        factors = d_out, normal(*weights).transpose(-2, -1)
    else:
        factors = normal(*rows).transpose(0, 1), d_out

    def run() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        torch._grouped_mm(*factors, offs=ends)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    return run
