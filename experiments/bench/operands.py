# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What products are measured with: rows spread over groups, numbers in few bits.

To add a load: a line in `loads`. To add a pair of formats: a line in `PAIRS`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pallas_kernels import quantize
from pallas_kernels.quantized_array import QuantizedDtype


class Pair(NamedTuple):
    """What the factors of a product become: (dtype, block size); None for what they are."""

    x: tuple[QuantizedDtype, int | None] | None
    w: tuple[QuantizedDtype, int | None] | None
    multiplied: str | None
    """The dtype that is multiplied; None: what the factors are."""


PAIRS: dict[str, Pair] = {
    "w8a8": Pair(("int8", None), ("int8", None), "int8"),
    "w4a8": Pair(("int8", None), ("int4", 128), "int8"),
    "w4a16": Pair(None, ("int4", 128), None),
    "fp8": Pair(("float8_e4m3fn", None), ("float8_e4m3fn", None), "float8_e4m3fn"),
}
"""By the bits of weights and activations."""


def rounded(x: Any, form: tuple[QuantizedDtype, int | None] | None, axis: int) -> Any:
    """An operand in its format; without blocks where they do not divide it.

    Args:
        x: Floating.
        form: Of a `Pair`.
        axis: The contracted one.
    """
    if form is None:
        return x
    dtype, block = form
    is_cut = block is not None and x.shape[axis] % block == 0
    return quantize(x, dtype, axis=axis, block_size=block if is_cut else None)


def loads(rows: int, groups: int) -> dict[str, np.ndarray]:
    """Sizes of groups that sum to `rows`: even, as a router scatters them, and skewed."""
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
