# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run that ends after a time, in order."""

import dataclasses

import pytest

from jaxmoe.run import Run
from jaxmoe.run.parts import TimeLimitConfig
from tests.jaxmoe.run.test_run import config


@pytest.mark.parametrize("minutes", [0.0, -1.0])
def test_a_limit_of_nothing_is_refused(minutes):
    with pytest.raises(ValueError, match=r"minutes=.* must be above 0"):
        TimeLimitConfig(minutes=minutes)


def test_a_run_ends_after_its_time_and_goes_on_without_it(tmp_path):
    """The first step is longer than the limit; the stop that it asks for follows the second."""
    given = config()
    limited = dataclasses.replace(given, parts=(TimeLimitConfig(minutes=1e-6),))
    result = Run(limited, tmp_path / "run").train()
    assert (result.status, result.step, result.checkpoint_step) == ("preempted", 2, 2)
    more = Run(given, tmp_path / "run").train()
    assert (more.status, more.step) == ("done", given.training.steps)
