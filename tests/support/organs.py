# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Why a default of a base class that one subclass alone replaces is at its place.

Such a default is named by class and member. A new one is refused by `tests/test_shape.py` until it
has a reason here; most are better placed in a table of combinations, in a record of traits, or in
the one file that needs them.
"""

from typing import Final

REASONS: Final[dict[str, str]] = {
    "Adapter.backward": "ReMix's router learns from several passes over each row, which only what"
    " differentiates a step can make; it asks any adapter",
    "AttentionConfig.initial_cache": "every mixer has it; shared keys need attention's, for fewer"
    " layers",
    "ExecutionConfig.cache_reading": "attention asks any execution; decoding alone reads part of a"
    " cache, which may change the loss and is therefore no field",
    "DispatchConfig.after_pilot": "only P/D-Serve sets its numbers of instances by measured times;"
    " the command that runs the pilot knows no member",
    "Instance.view": "a plan that stops between layers sees how far each piece has come; rules and"
    " policies ask any instance",
    "ItemCache.is_valid": "answers of a semantic cache age; a replay asks before it counts a hit",
    "RequestDispatcher.keeps": "SAGA alone weighs the pages of a call that has ended; the fleet,"
    " which takes them back, asks any dispatcher",
    "RunPartConfig.step_parts": "DESIGN's run parts bring step parts; CheckFree does here, and the"
    " page of extending shows another in a package of its own",
    "SourceKind.is_implied": "conversations have the flags of files, and text of files is not to"
    " become conversations; the parser of flags asks the members of any choice",
}
"""{"Class.member": why one subclass needs it, and why the base class is its place}."""

UNTREATED: Final = 63
"""Most of these defaults that have no reason yet; it only falls."""
