# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Provides operands of measured products: rows spread over groups, values in few bits.

To add a load: a line in `loads` of `experiments/bench/operands.py`. To add a pair of formats: a
line in `PAIRS` of `experiments/bench/operands.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pallas_kernels import quantize
from pallas_kernels.quantized_array import QuantizedDtype


class Pair(NamedTuple):
    """Formats (dtype, block size) of the factors of a product; None keeps a factor."""

    x: tuple[QuantizedDtype, int | None] | None
    w: tuple[QuantizedDtype, int | None] | None
    multiplied: str | None
    """Dtype that is multiplied; None for that of the factors."""


PAIRS: dict[str, Pair] = {
    "w8a8": Pair(("int8", None), ("int8", None), "int8"),
    "w4a8": Pair(("int8", None), ("int4", 128), "int8"),
    "w4a16": Pair(None, ("int4", 128), None),
    "fp8": Pair(("float8_e4m3fn", None), ("float8_e4m3fn", None), "float8_e4m3fn"),
}
"""Pairs by the bits of weights and activations."""


def round_operand(x: Any, form: tuple[QuantizedDtype, int | None] | None, axis: int) -> Any:
    """Return an operand in its format; without blocks where they do not divide it.

    Args:
        x: Floating array.
        form: Format of a `Pair`.
        axis: Contracted axis.
    """
    if form is None:
        return x
    dtype, block = form
    is_cut = block is not None and x.shape[axis] % block == 0
    return quantize(x, dtype, axis=axis, block_size=block if is_cut else None)


def loads(rows: int, groups: int) -> dict[str, np.ndarray]:
    """Return group sizes that sum to `rows`: even, as scattered by a router, and skewed."""
    random = np.random.default_rng(0)
    even = np.full(groups, 1.0)
    scattered = random.multinomial(rows, even / groups).astype(float)
    by_name = {
        "even": even,
        "scattered": scattered,
        "fresh router": np.exp(random.normal(0.0, 0.6, groups)),
        "zipf": 1.0 / np.arange(1, groups + 1),
        "one group": np.eye(groups)[0],
    }
    return {name: _whole_sizes(weights, rows) for name, weights in by_name.items()}


def _whole_sizes(weights: np.ndarray, rows: int) -> np.ndarray:
    ends = np.round(np.cumsum(weights) / weights.sum() * rows).astype(np.int32)
    return np.diff(ends, prepend=0).astype(np.int32)
