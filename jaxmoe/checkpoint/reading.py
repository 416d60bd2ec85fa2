# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reading a step in several processes: what one of them finds wrong is wrong for all.

Each process reads its arrays alone, without the barrier that Orbax has at the end of a restore (a
process that raised before would leave the others in it); they meet when all have read. Manifest
and list of steps are the first process's: a file system may show others an older directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from jaxmoe.checkpoint.manifest import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManifest,
)
from jaxmoe.state_tree import SEPARATOR
from sharding.distributed import agree, share


def array_reader(handler: ocp.CheckpointHandler) -> ocp.Checkpointer:
    """Reads arrays in this process alone; its use is to be within `Reading`.

    Args:
        handler: of Orbax, made without these options: with them it would change what every other
            handler of the process writes.
    """
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


class Reading:
    """What Orbax and TensorStore raise while they read arrays, as a line, on all processes.

    Orbax raises plain `Exception` with pages about the store; the cause has one line. What else is
    raised, a full memory for instance, passes. Every process must enter and leave.

    Args:
        where: what to call the checkpoint.
    """

    def __init__(self, where: str):
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        is_damage = kind is Exception or isinstance(error, ValueError | OSError)
        if error is not None and not is_damage:
            return
        if agree(int(is_damage)):
            cause = (error and error.__cause__) or error or "as another process found"
            reason = (str(cause).splitlines() or ["without a reason"])[0][:300]
            raise CheckpointDamagedError(
                f"{self._where} is damaged: its arrays cannot be read ({reason})"
            ) from error


def shared_steps(find: Callable[[], list[int]]) -> list[int]:
    """What the first process finds; every process must call this.

    Args:
        find: lists steps.
    """
    found = find() if jax.process_index() == 0 else []
    return share(np.asarray(found, np.int32), jax.process_index() == 0).tolist()


def shared_manifest(read: Callable[[], CheckpointManifest]) -> CheckpointManifest:
    """The manifest as the first process reads it; every process must call this.

    Args:
        read: reads it.

    Raises:
        CheckpointError: as the first process's.
    """
    if jax.process_count() == 1:
        return read()
    said: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            said = {"manifest": read().to_json()}
        except CheckpointError as error:
            said = {"is_damage": isinstance(error, CheckpointDamagedError), "error": str(error)}
    sent = np.frombuffer(json.dumps(said).encode(), np.uint8)
    said = json.loads(share(sent, jax.process_index() == 0).tobytes())
    if "error" in said:
        raise (CheckpointDamagedError if said["is_damage"] else CheckpointError)(said["error"])
    return CheckpointManifest.from_json(said["manifest"], "the manifest")


def target_of(manifest: CheckpointManifest) -> dict[str, Any]:
    """The tree that a manifest describes; random keys as keys of the default generator.

    Args:
        manifest: of the checkpoint.
    """
    keys = jax.eval_shape(lambda: jax.random.key(0))
    flat = {
        path: jax.ShapeDtypeStruct(
            tuple(array["shape"][:-1]) if array["dtype"] == "key" else tuple(array["shape"]),
            keys.dtype if array["dtype"] == "key" else array["dtype"],
        )
        for path, array in manifest.arrays.items()
    }
    return traverse_util.unflatten_dict(flat, sep=SEPARATOR)
