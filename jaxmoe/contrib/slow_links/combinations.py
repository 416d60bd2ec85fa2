# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with workers that communicate rarely; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, above, differs, equals, is_set, member, no_member, that, trait

_WORKERS: Final = that("replicas", "with workers", lambda method: method.exchanges != "nothing")
_MERGED: Final = that(
    "replicas", "with merged parameters", lambda method: method.exchanges == "parameters"
)

ROWS: Final = (
    Row(
        _WORKERS,
        above("execution.mesh.stage", 1),
        "{second} with {first}: a worker cannot be a pipeline yet",
        "set execution.mesh.stage to 1",
    ),
    Row(
        _WORKERS,
        equals("execution.rules", "hybrid", "hierarchical", "nested"),
        "{second} shares the state of all replicas out, and with {first} each has its own",
        "choose fully_sharded or zero2",
    ),
    Row(
        _WORKERS,
        differs("execution.offload.optimizer"),
        "{second} with {first}: the optimisers of workers stay on their devices",
        "set execution.offload to None",
    ),
    Row(
        _WORKERS,
        equals("data.packing", "levels"),
        "{second} packs the batch of all devices, and {first} gives each worker a batch of its own",
        "set data.packing to best_fit",
    ),
    Row(
        _WORKERS,
        member("parts.*", "check_free", shown="parts"),
        "{second} weighs layers by the gradients of one model, and {first} trains several",
        "leave check_free out of parts",
    ),
    Row(
        _WORKERS,
        member("parts.*", "gradient_comparison", shown="parts"),
        "{second} compares gradients of equal parameters, and workers of {first} have their own",
        "leave gradient_comparison out of parts",
    ),
    Row(
        _WORKERS,
        trait("training.gradients", "is_backward", "without a backward pass", value=False),
        "{second} has no gradients for {first} to exchange",
        "choose replicas:none",
    ),
    Row(
        _MERGED,
        is_set("training.average"),
        "{first} merges the parameters of workers, and {second} averages those of one",
        "choose replicas:none, or leave out training.average",
    ),
    Row(
        _MERGED,
        trait("model.adapter", "has_after_step", "that changes the state"),
        "{first} merges the parameters of workers, and {second} changes them after each step",
        "choose replicas:none",
    ),
    Row(
        member("replicas", "one_bit_adam", shown="replicas.momentum"),
        that(
            "",
            "other than replicas.momentum",
            lambda config: (
                getattr(config.optimizer, "beta1", config.replicas.momentum)
                != config.replicas.momentum
            ),
            shown="optimizer.beta1",
            needs=("optimizer", "replicas"),
        ),
        "{second} must be that of the momentum which workers agree on, {first}",
        "set one to the other",
    ),
    Row(
        member("replicas", "one_bit_adam"),
        no_member("optimizer", "adamw"),
        "{second} cannot take the momentum that workers of {first} agreed on, since that needs"
        " second moments of all parameters",
        "choose optimizer:adamw",
    ),
    Row(
        _WORKERS,
        is_set("rl"),
        "rl draws the answers of a step by the parameters of the step before, and {first} has"
        " workers with parameters of their own",
        "choose replicas:none",
    ),
)
