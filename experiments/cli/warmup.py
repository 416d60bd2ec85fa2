# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fits the schedule of a recipe to the number of steps that a command line asks for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from jaxmoe.optim.schedules import ScheduleBase

Config = TypeVar("Config")


def fit_warmup(config: Config, words: Sequence[str]) -> Config:
    """Return the config with a warm-up or decay that fits its steps, and note what has changed.

    Args:
        config: The config of a command. Without a schedule and steps it is returned unchanged.
        words: The arguments; fields that they name stay as they are.
    """
    schedule = getattr(config, "schedule", None)
    steps = getattr(getattr(config, "training", None), "steps", None)
    if not isinstance(schedule, ScheduleBase) or steps is None:
        return config
    named = [word[2:].partition("=")[0].replace("-", "_") for word in words]
    given = {name.removeprefix("schedule.") for name in named if name.startswith("schedule.")}
    fitted = schedule.fitted(steps, given)
    if fitted is schedule:
        return config
    changed = [
        f"schedule.{field.name} {getattr(schedule, field.name):g} ->"
        f" {getattr(fitted, field.name):g}"
        for field in dataclasses.fields(schedule)
        if getattr(schedule, field.name) != getattr(fitted, field.name)
    ]
    print(
        f"note: {', '.join(changed)}, to fit training.steps={steps}",
        file=sys.stderr,
        flush=True,
    )
    changes: dict[str, Any] = {"schedule": fitted}
    return dataclasses.replace(config, **changes)  # pyright: ignore[reportArgumentType]
