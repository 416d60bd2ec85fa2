# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws two choices that a row of `jaxmoe/combinations.py` refuses, and tries them all the same.

The table is not read, and a step of the run is compared with that of one device. Outcomes are
`refused` by the part that cannot compute it, `fails` with an error, `differs`, and `needless`: the
step is that of one device, and either the reason of the row lies outside of a step, or the row is
to be deleted.
"""

from __future__ import annotations

import pathlib
from unittest import mock

import numpy as np

from jaxmoe import combinations
from tests.fuzz import pairs
from tests.fuzz.outcome import Outcome, pick
from tests.support.dotted import changed


def check(rng: np.random.Generator, place: pathlib.Path) -> Outcome:
    """Try a step of a run with two drawn choices of a row.

    Args:
        rng: Generator of the draw.
        place: Empty directory; unused.
    """
    del place
    fields = draw(rng)
    text = message(fields)
    with mock.patch.object(combinations, "_check", lambda config, names: None):
        try:
            outcome = pairs.compare_with(fields)
        except AssertionError as error:
            return Outcome("differs", f"{text}: {str(error).splitlines()[:2]}")
        except Exception as error:
            return Outcome("fails", f"{text}: {type(error).__name__} {str(error)[:200]}")
    return outcome if outcome.name == "refused" else Outcome("needless", text)


def draw(rng: np.random.Generator) -> pairs.Fields:
    """Return the fields of two choices that a row refuses."""
    while True:
        first, second = (str(name) for name in rng.permutation(sorted(pairs.CHOICES))[:2])
        fields = {**pick(rng, pairs.CHOICES[first]), **pick(rng, pairs.CHOICES[second])}
        if pairs.is_in_table(fields):
            return fields


def message(fields: pairs.Fields) -> str:
    """Return the words of the row that refuses some choices."""
    try:
        changed(pairs.BASE, fields)
    except combinations.CombinationError as error:
        return str(error)
    raise AssertionError("no row refuses them")
