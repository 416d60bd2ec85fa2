# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rolls a run back to a checkpoint when too many steps in a row were refused.

    refused   steps b-k+1 .. b, each of which changed nothing (k = training.max_skipped)
    dumped    their batches, to bad_data/ (`experiments.replay` analyses them)
    restored  the newest valid checkpoint that has read none of them, or the initial state
    skipped   their rows, once: step b-k+1 reads what step b+1 would have read

The steps between are trained again, on the same data. The window does not depend on how often
metrics are reported. The skipped rows are recorded twice (see `jaxmoe.data.skipped`): first in
`skipped.json`, and then in the data position of every later checkpoint, so that a restart at any
moment, from any checkpoint, continues as the run would have. A checkpoint of an abandoned step is
set aside.

After `training.rollbacks` windows the run ends as diverged. Every process decides from the same
metrics and records; the first one writes. Learning rate, clipping and the order of the data after
the window do not change.

`jaxmoe/run/trainer.py` does this in `_go_back`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax

from jaxmoe.data import Loader
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.diagnostics.refused_batches import dump_batches
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts.base import RunPart
from jaxmoe.run.restore import Lineage
from sharding.distributed import agree

logger = logging.getLogger(__name__)


def without_refused(
    directory: RunDirectory,
    assembly: Assembly,
    refused: tuple[int, int],
    parts: Sequence[RunPart],
) -> Lineage | None:
    """Write the data of refused steps, and return the states that go on without them.

    Args:
        directory: Run directory, held by this process.
        assembly: Plan, devices and data of the steps.
        refused: First and last of the refused steps.
        parts: Parts of the run.

    Returns:
        The lineage without the rows of these steps; None if the run cannot go back.
    """
    loader = assembly.loader
    dump_batches(directory, loader, refused)
    is_last = len(loader.skipped.windows) >= assembly.plan.config.training.rollbacks
    if is_last or not all(part.goes_back for part in parts):
        return None
    return _jump(directory, loader, refused)


def _jump(directory: RunDirectory, loader: Loader, refused: tuple[int, int]) -> Lineage | None:
    """Record skipped rows and return the lineage without them; None if they cannot be recorded."""
    first, last = refused
    loader = loader.without_steps(first - 1, last - 1)  # step n reads batch n - 1
    problem = None
    if jax.process_index() == 0:
        try:
            directory.write_skipped(loader.skipped.to_json())
        except ValueError as error:
            problem = error
    if agree(problem is not None):
        logger.warning("the run cannot go back: %s", problem or "the first process says why")
        return None
    return Lineage(loader, loader.skipped)


def rollback_message(
    directory: RunDirectory, assembly: Assembly, refused: tuple[int, int], step: int
) -> str:
    """Return the message about a rollback.

    Args:
        directory: Run directory.
        assembly: Plan, devices and data of the steps that follow.
        refused: First and last of the refused steps.
        step: Step to which the run went back.
    """
    windows = assembly.loader.skipped.windows
    first, last = refused
    back = f"the checkpoint of step {step}" if step else "the initial state"
    return (
        f"rolled back to {back}: steps {first} to {last} were refused, and their data are skipped"
        f" before step {first} (rollback {len(windows)} of at most"
        f" {assembly.plan.config.training.rollbacks}); look into it with python -m"
        f" experiments.replay --run.directory {directory.path} --step {first}"
    )
