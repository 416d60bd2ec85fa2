# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference of HALO in numpy float64, with whole rotation matrices.

`rounded` is the only inexact step: without it all levels give x W and its gradients.
"""

import math
from collections.abc import Callable

import numpy as np

from pallas_kernels.halo.hadamard import hadamard_matrix, rotated_together

Round = Callable[[np.ndarray], np.ndarray]


def product(
    x: np.ndarray, w: np.ndarray, e: np.ndarray, *, level: int, block: int | None, rounded: Round
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return y = x w, and the gradients of x and w.

    Args:
        x: Activations [m k].
        w: Weight [k n].
        e: Gradient of y [m n].
        level: Level of HALO.
        block: Largest number of values that are rotated together.
        rounded: Maps a tensor to its rounded values, as float64.
    """
    turn = rotation(x.shape[1], block if level else 1)
    tokens = rotation(x.shape[0], block if level == 2 else 1)
    x_codes = rounded(x @ turn)
    codes = rounded(turn.T @ w)
    d_x = tokens.T @ (rounded(tokens @ e) @ codes.T) @ turn.T
    return x_codes @ codes, d_x, turn @ (x_codes.T @ rounded(e))


def rotation(width: int, most: int | None) -> np.ndarray:
    """Return the orthonormal matrix [width width], block by block.

    Args:
        width: Width of the axis.
        most: Largest block; None for no limit.
    """
    block = rotated_together(width, most)
    return np.kron(np.eye(width // block), hadamard_matrix(block) / math.sqrt(block))
