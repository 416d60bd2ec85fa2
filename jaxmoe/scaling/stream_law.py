# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The loss of a model of N parameters that computes P streams, and a fit of it.

    L = E + (A 1e9 / (N (k ln P + 1)))^alpha

Published on Stack-V2: E 0.691, A 0.0113, alpha 0.189, k 0.393; on the Pile: 1.289, 0.197, 0.196,
0.334. `fit_stream_law` solves for E and A^alpha by linear least squares, and searches alpha and k.

Source: ParScale, arXiv 2505.10475.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

_ROUNDS = 60
_POINTS = 9


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamLaw:
    """Loss by parameters and streams."""

    irreducible: float
    """E."""
    scale: float
    """A, in 1e9 parameters."""
    exponent: float
    """alpha."""
    gain: float
    """k, gain of ln P."""

    def loss(self, parameters: np.ndarray, streams: np.ndarray) -> np.ndarray:
        """Return L.

        Args:
            parameters: N of each model.
            streams: P of each model.
        """
        effective = parameters * (self.gain * np.log(streams) + 1.0)
        return self.irreducible + (self.scale * 1e9 / effective) ** self.exponent


def fit_stream_law(parameters: np.ndarray, streams: np.ndarray, losses: np.ndarray) -> StreamLaw:
    """Return the law of least squares, with alpha in (0, 1] and k in [0, 2].

    Args:
        parameters: N of each model.
        streams: P of each model.
        losses: L of each model.

    Raises:
        ValueError: There are fewer than four models, or one number of streams.
    """
    if len(losses) < 4 or len(np.unique(streams)) < 2:
        raise ValueError(
            f"{len(losses)} models with {len(np.unique(streams))} different numbers of streams do"
            " not determine the four numbers of the law: give four models or more, and two numbers"
        )

    def solve(exponent: float, gain: float) -> tuple[float, np.ndarray]:
        reduced = (1e9 / (parameters * (gain * np.log(streams) + 1.0))) ** exponent
        columns = np.stack([np.ones_like(reduced), reduced], axis=1)
        solution = np.linalg.lstsq(columns, losses, rcond=None)[0]
        return float(np.sum((columns @ solution - losses) ** 2)), solution

    centre = (0.505, 1.0)
    reach = (0.495, 1.0)
    for _ in range(_ROUNDS):
        grids = [
            np.clip(middle + half * np.linspace(-1.0, 1.0, _POINTS), low, high)
            for middle, half, low, high in zip(centre, reach, (1e-3, 0.0), (1.0, 2.0), strict=True)
        ]
        centre = min(itertools.product(*grids), key=lambda point: solve(*point)[0])
        reach = (0.7 * reach[0], 0.7 * reach[1])
    exponent, gain = map(float, centre)
    irreducible, weight = solve(exponent, gain)[1]
    scale = float(max(weight, 0.0)) ** (1.0 / exponent)
    return StreamLaw(irreducible=float(irreducible), scale=scale, exponent=exponent, gain=gain)
