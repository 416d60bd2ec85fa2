# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws two choices that no row of `jaxmoe/combinations.py` refuses, and lowers a step of them.

The draws of `pairs` without compiling and computing: a tenth of the time, so that thousands show
which pairs the library cannot build. The step is lowered on 8 devices with the layouts of a run.
"""

from __future__ import annotations

import pathlib
import warnings

import numpy as np

from jaxmoe.choices import spell_choice
from jaxmoe.planning.abstract_step import trace_step
from jaxmoe.run.assemble import assemble
from tests.fuzz import pairs
from tests.fuzz.outcome import Outcome, refusal
from tests.support.dotted import changed


def check(rng: np.random.Generator, place: pathlib.Path) -> Outcome:
    """Lower a step of a run with two drawn choices.

    Args:
        rng: Generator of the draw.
        place: Empty directory; unused.
    """
    del place
    fields = pairs.draw(rng)
    text = ", ".join(spell_choice(*item) for item in fields.items())
    print(text, flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # advice on combinations
        try:
            assembly = assemble(changed(pairs.BASE, fields))
        except ValueError as error:
            return Outcome("refused", f"{text}: {refusal(error)}")
        plan = assembly.plan.step_plan(assembly.execution)
        trace_step(plan, assembly.mesh).lower()
    return Outcome("lowered", text)
