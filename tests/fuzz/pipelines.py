# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws as `meshes` does, with stages in every draw, and compares two steps with one device."""

from __future__ import annotations

import pathlib

import numpy as np

from tests.fuzz import meshes
from tests.fuzz.outcome import Outcome


def check(rng: np.random.Generator, place: pathlib.Path) -> Outcome:
    """Compare a drawn setup with stages on its mesh with one device."""
    return meshes.check(rng, place, staged=1.0)
