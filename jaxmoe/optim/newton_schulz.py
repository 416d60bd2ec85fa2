# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz iteration: an approximately orthogonal matrix by matrix products alone.

    X = V / (||V|| + epsilon)                       Frobenius norm; a tall matrix is transposed
    for (a, b, c) in coefficients:  A = X X^T,  X = a X + (b A + c A A) X

If V = P S Q^T then the result is P f(S) Q^T, with f the composition of the odd polynomials
a s + b s^3 + c s^5. Under "dion" f maps [0.01, 1] into [0.978, 1.032]; a singular value of 0.001
becomes 0.475, so the smallest directions of a square matrix stay below 1.

Sources: K. Jordan et al., Muon, 2024; arXiv 2504.05295 (Dion) for the five rows; optax.contrib.muon
0.2.8, whose two presets these are. Its other preconditionings (spectral, aol, schatten) are not
supported.

To add coefficients: COEFFICIENTS and `Coefficients` in `jaxmoe/optim/newton_schulz.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.optim.steps import Number

Coefficients = Literal["dion", "standard"]
Triple = tuple[float, float, float]

COEFFICIENTS: Final[Mapping[Coefficients, tuple[Triple, ...]]] = {
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "standard": ((3.4445, -4.7750, 2.0315),) * 5,
}
"""(a, b, c) of each iteration. "dion" ends close to 1; "standard" ends between 0.68 and 1.14."""


def newton_schulz(
    x: Float[Array, "... m n"],
    *,
    coefficients: Coefficients = "dion",
    epsilon: Number = 1e-8,
    dtype: Any = jnp.float32,
) -> Float[Array, "... m n"]:
    """Return each matrix of a stack with singular values close to 1; zeros stay zeros.

    Args:
        x: Matrices in the last two dimensions, each normalised by itself.
        coefficients: Row of COEFFICIENTS.
        epsilon: Number added to the norm.
        dtype: Dtype of the products; the hardware chooses that of their sums.

    Returns:
        Matrices in the dtype of x.

    Raises:
        ValueError: The coefficients are unknown.
    """
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"coefficients={coefficients!r} must be one of {', '.join(COEFFICIENTS)}")
    is_tall = x.shape[-2] > x.shape[-1]
    wide = (x.mT if is_tall else x).astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(wide * wide, axis=(-2, -1), keepdims=True))
    y = (wide / (norm + epsilon)).astype(dtype)

    def iterate(y: Array, triple: Array) -> tuple[Array, None]:
        a, b, c = triple
        gram = _product(y, y.mT)
        powers = _sum(b, gram, c, _product(gram, gram))
        return _sum(a, y, 1.0, _product(powers, y)), None

    # A scan: five copies of the body took twice as long to compile and ran no faster.
    y, _ = jax.lax.scan(iterate, y, jnp.asarray(COEFFICIENTS[coefficients], jnp.float32))
    return (y.mT if is_tall else y).astype(x.dtype)


def newton_schulz_flops(fan_in: int, fan_out: int) -> float:
    """Return the FLOPs of `newton_schulz` of one matrix: (4 m^2 n + 2 m^3) an iteration, m <= n.

    Args:
        fan_in: Rows.
        fan_out: Columns.
    """
    m, n = sorted((fan_in, fan_out))
    return len(COEFFICIENTS["dion"]) * (4.0 * m * m * n + 2.0 * m**3)


def _sum(a: Any, x: Array, b: Any, y: Array) -> Array:
    """Return a x + b y, rounded once; coefficients in bfloat16 would enlarge the result by 2%."""
    return (a * x.astype(jnp.float32) + b * y.astype(jnp.float32)).astype(x.dtype)


def _product(lhs: Array, rhs: Array) -> Array:
    return jnp.matmul(lhs, rhs, preferred_element_type=lhs.dtype)
