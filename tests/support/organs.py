# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Why a default of a base class that one subclass alone replaces is at its place.

Such a default is named by class and member. A new one is refused by `tests/test_shape.py` until it
has a reason here; most are better placed in a table of combinations, in a record of traits, or in
the one file that needs them.
"""

from typing import Final

REASONS: Final[dict[str, str]] = {
    "AttentionConfig.initial_cache": "every mixer has it; shared keys need attention's, for fewer"
    " layers",
    "ExecutionConfig.cache_reading": "attention asks any execution; decoding alone reads part of a"
    " cache, which may change the loss and is therefore no field",
    "HyperConnection.setup": "Flax's constructor; a loop adds a gate to those of a connection",
}
"""{"Class.member": why one subclass needs it, and why the base class is its place}."""

UNTREATED: Final = 103
"""Most of these defaults that have no reason yet; it only falls."""
