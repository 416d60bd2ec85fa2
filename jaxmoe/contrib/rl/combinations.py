# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with rollouts; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, above, differs, is_set, that, unset
from jaxmoe.contrib.rl.objective import PolicyGradientConfig

ROWS: Final = (
    Row(
        that(
            "training.objective",
            "of answers",
            lambda objective: isinstance(objective, PolicyGradientConfig),
        ),
        unset("rl"),
        "{first} trains on answers and their rewards, and rl is None",
        "train with jaxmoe rl",
    ),
    Row(
        is_set("rl"),
        that(
            "training.objective",
            "of data",
            lambda objective: not isinstance(objective, PolicyGradientConfig),
        ),
        "{second} trains on data, and rl draws answers",
        "set training.objective to policy_gradient",
    ),
    Row(
        is_set("rl"),
        is_set("training.batch_ramp"),
        "every step of rl has rl.prompts x rl.group answers, and training.batch_ramp changes them",
        "set training.batch_ramp to None",
    ),
    *(
        Row(
            is_set("training.average"),
            above(f"rl.{field}", 1),
            "{first} takes the place of the parameters after the first update of the last step, and"
            " with {second} more follow",
            f"set rl.{field} to 1, or leave out training.average",
        )
        for field in ("epochs", "minibatches")
    ),
    Row(
        differs("rl.sync", "copy"),
        unset("rl.staleness"),
        "{first} updates parameters that the engine keeps, and with {second} it answers by those in"
        " training",
        "set rl.staleness to 1 or more, or rl.sync to copy",
    ),
    Row(
        is_set("rl.staleness"),
        that(
            "rl",
            "trainer without rl.truncation",
            lambda rollouts: rollouts.old == "trainer" and rollouts.truncation is None,
            shown="rl.old",
        ),
        "{first} draws answers by earlier parameters, and with {second} and no rl.truncation they"
        " would be trained as if those in training had drawn them",
        "set rl.old to engine, or rl.truncation, such as 2",
    ),
    Row(
        differs("rl.truncation"),
        differs("rl.old", "trainer"),
        "{first} compares trainer and engine, and {second} computes no log-probabilities again",
        "set rl.old to trainer, or rl.truncation to None",
    ),
    Row(
        that("rl", "set", lambda rollouts: rollouts.num_answers > 0, shown="rl.num_answers"),
        that(
            "",
            "other than rl.prompts x rl.group",
            lambda config: config.training.batch_size != config.rl.num_answers,
            shown="training.batch_size",
            needs=("training", "rl"),
        ),
        "{second} must be rl.prompts x rl.group at every step, {first}",
        "set training.batch_size so",
    ),
)
