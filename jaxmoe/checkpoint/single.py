# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Saves or restores one state in one call, without a `CheckpointManager` of the caller."""

from __future__ import annotations

from typing import Any

from jaxmoe.checkpoint.base_model import BaseModel
from jaxmoe.checkpoint.manager import CheckpointManager, Verify
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import to_json


def save_checkpoint(
    directory: Any,
    state: Any,
    *,
    step: int,
    config: Any,
    data: dict[str, Any] | None = None,
    base: BaseModel | None = None,
) -> None:
    """Save one state and wait until it is committed.

    Args:
        directory: Directory of all checkpoints of a run; the state goes to `<directory>/<step>`.
        state: Tree of named arrays, such as a `TrainState`.
        step: Number of the checkpoint.
        config: Config dataclass of this library, or a JSON object.
        data: Data position.
        base: Model that an adapter is trained on, whose parameters are left out.

    Raises:
        CheckpointError: The step exists, or could not be written.
    """
    manager = CheckpointManager(directory, keep=1_000_000, base=base)
    try:
        if step in manager.steps():
            raise CheckpointError(f"{directory} already has a checkpoint of step {step}")
        config_json = config if isinstance(config, dict) else to_json(config)
        is_saved = manager.save(step, state, config=config_json, data=data) and manager.finish()
    finally:
        manager.close()
    if not is_saved:
        raise CheckpointError(f"the checkpoint of step {step} was not saved in {directory}")


def load_checkpoint(
    directory: Any, *, step: int | None = None, target: Any = None, verify: Verify = "full"
) -> Any:
    """Restore a state.

    Args:
        directory: Directory of the checkpoints of a run.
        step: Step to restore; the newest undamaged one when None.
        target: State to restore to, see `CheckpointManager.restore`; nested dicts of arrays on the
            default device when None.
        verify: Checks of the restore.

    Returns:
        The state.

    Raises:
        CheckpointError: There is no such step or no step, its arrays differ from the target's, or
            it is damaged.
    """
    manager = CheckpointManager(directory, is_writer=False, verify=verify)
    try:
        if step is not None:
            return manager.restore(step, target)
        newest = manager.restore_newest(target)
        if newest is None:
            raise CheckpointError(f"{directory} holds no checkpoints")
        return newest[1]
    finally:
        manager.close()
