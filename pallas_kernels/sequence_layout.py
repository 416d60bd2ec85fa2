# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a sequence each rank of a mesh axis holds.

Of a causal sequence the late tokens see more than the early ones, so that equal pieces are unequal
work. With N ranks:

    contiguous   rank r holds the r-th of N pieces: the last one works 2 - 1/N times the mean
    zigzag       of 2N pieces rank r holds r and 2N - 1 - r: all work alike

To add a layout: a function, its name in `SequenceLayout`.
"""

from typing import Literal

import numpy as np

from pallas_kernels.array_types import Array, Int

SequenceLayout = Literal["contiguous", "zigzag"]


def sequence_order(
    length: int,
    ranks: int,
    layout: SequenceLayout = "zigzag",
) -> Int[Array, " S"] | Int[np.ndarray, " S"]:
    """The token held at each sharded position: rank r holds the r-th of `ranks` equal parts.

    Args:
        length: of the sequence.
        ranks: devices that share it.
        layout: which tokens go together.

    Returns:
        A permutation; `x[order]` is laid out, `x[order][np.argsort(order)]` is x again.

    Raises:
        ValueError: the length does not divide.
    """
    pieces = ranks if layout == "contiguous" else 2 * ranks
    if length % pieces:
        raise ValueError(
            f"sequence_order: length={length} must be divisible by {pieces}"
            f" ({layout} over {ranks} ranks): pad to {-(-length // pieces) * pieces}"
        )
    parts = np.arange(length, dtype=np.int32).reshape(pieces, -1)
    if layout == "zigzag":
        parts = np.stack([parts[:ranks], parts[: ranks - 1 : -1]], axis=1)
    return parts.reshape(length)
