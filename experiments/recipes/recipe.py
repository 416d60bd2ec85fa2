# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`recipe`: lets a function that returns a configuration take training fields as keywords."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxmoe.run.config import PretrainConfig


def recipe(function: Callable[[], PretrainConfig]) -> Callable[..., PretrainConfig]:
    """Return the function with keyword arguments for the fields of `TrainingConfig`.

    `tiny(steps=200, batch_size=4)` is `tiny()` with these values, like the flags
    `--training.steps 200 --training.batch_size 4`. A warm-up longer than a fifth of the steps is
    shortened to that.

    Args:
        function: Returns the configuration of a run.
    """

    @functools.wraps(function)
    def with_training(**training: Any) -> PretrainConfig:
        config = function()
        changed = dataclasses.replace(config.training, **training)
        schedule = config.schedule
        if "steps" in training and schedule.warmup_steps > changed.steps // 5:
            schedule = dataclasses.replace(schedule, warmup_steps=changed.steps // 5)
        return dataclasses.replace(config, training=changed, schedule=schedule)

    return with_training
