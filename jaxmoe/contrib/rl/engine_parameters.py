# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters of an engine that follow those in training by updates of changed elements.

The engine holds a version of its own. Each time answers are drawn, the difference between it and
the parameters of now is made, applied, and measured, as between a trainer and an engine that are
separate processes.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.contrib.rl.weight_sync import apply, update
from jaxmoe.tracking.tracker import SYNC_BYTES, SYNC_SHARE


class EngineParameters:
    """Version that the engine holds.

    Args:
        served: exact: parameters as they are trained. bfloat16: rounded, so that few change.
    """

    def __init__(self, served: Literal["exact", "bfloat16"]):
        self._served = served
        self._held = None

    def follow(self, params: Any) -> tuple[Any, dict[str, float]]:
        """Return parameters of now as the engine has them, and the measures of what was sent.

        Args:
            params: Parameters in training, on the devices.

        Returns:
            Arrays on the host with the dtypes of `params`; share of the bytes and bytes sent. All
            are sent the first time.
        """
        arrays = jax.device_get(params)
        current = jax.tree.map(self._round_to, arrays)
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(current))
        sent = total
        if self._held is None:
            self._held = current
        else:
            change = update(self._held, current)
            self._held = apply(self._held, change)
            sent = change.num_bytes
        full = jax.tree.map(
            lambda engine_array, array: engine_array.astype(array.dtype), self._held, arrays
        )
        return full, {SYNC_SHARE: sent / total, SYNC_BYTES: float(sent)}

    def _round_to(self, array: np.ndarray) -> np.ndarray:
        is_rounded = self._served == "bfloat16" and jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(jnp.bfloat16) if is_rounded else array
