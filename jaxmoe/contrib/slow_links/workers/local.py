# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Where the state of workers stands in a training state."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from jaxmoe.training.state import TrainState

WORKERS: Final = "workers"
"""Key in `TrainState.parts`."""


def local_of(state: TrainState) -> Any:
    """Return the states of the workers, or what their exchanges remember.

    Args:
        state: State of a run with workers.
    """
    return state.parts[WORKERS]


def with_local(state: TrainState, local: Any) -> TrainState:
    """Return a training state with other states of the workers.

    Args:
        state: State of a run with or without workers.
        local: States of the workers, or what their exchanges remember.
    """
    return dataclasses.replace(state, parts={**state.parts, WORKERS: local})
