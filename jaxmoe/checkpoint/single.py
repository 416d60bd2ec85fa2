# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One state saved, or restored, in one call; a run keeps a `CheckpointManager`."""

from __future__ import annotations

from typing import Any

from jaxmoe.checkpoint.manager import CheckpointManager, Verify
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import to_json


def save_checkpoint(
    directory: Any, state: Any, *, step: int, config: Any, data: dict[str, Any] | None = None
) -> None:
    """Saves one state and waits until it is committed.

    Args:
        directory: of all checkpoints of a run; the state goes to `<directory>/<step>`.
        state: any tree of named arrays, a `TrainState` for instance.
        step: names the checkpoint.
        config: a config of ours, or a JSON object.
        data: data position.

    Raises:
        CheckpointError: the step exists, or it could not be written.
    """
    manager = CheckpointManager(directory, keep=1_000_000)
    try:
        if step in manager.steps():
            raise CheckpointError(f"{directory} already has a checkpoint of step {step}")
        given = config if isinstance(config, dict) else to_json(config)
        is_saved = manager.save(step, state, config=given, data=data) and manager.finish()
    finally:
        manager.close()
    if not is_saved:
        raise CheckpointError(f"the checkpoint of step {step} was not saved in {directory}")


def load_checkpoint(
    directory: Any, *, step: int | None = None, target: Any = None, verify: Verify = "full"
) -> Any:
    """Restores a state.

    Args:
        directory: of the checkpoints of a run.
        step: the newest that is what was written when None.
        target: the state wanted, see `CheckpointManager.restore`; nested dicts of arrays on the
            default device when None.
        verify: what is checked.

    Raises:
        CheckpointError: nothing to restore, no such step, another state, or a damaged one.
    """
    manager = CheckpointManager(directory, is_writer=False, verify=verify)
    try:
        if step is not None:
            return manager.restore(step, target)
        found = manager.restore_newest(target)
        if found is None:
            raise CheckpointError(f"{directory} holds no checkpoints")
        return found[1]
    finally:
        manager.close()
