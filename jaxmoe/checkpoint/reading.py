# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a step in several processes, and raises on all of them if one of them fails.

Each process reads its arrays without Orbax's barrier at the end of a restore, in which the others
would wait for a process that raised; `Reading` is the barrier instead. Manifest and list of steps
are read by the first process alone: a file system may show an older directory to the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from jaxmoe.checkpoint import bounds
from jaxmoe.checkpoint.damage import Verify
from jaxmoe.checkpoint.manifest import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManifest,
    check_fingerprints,
    check_target,
)
from jaxmoe.checkpoint.optional_parts import with_optional, without_optional
from jaxmoe.host_memory import return_memory
from jaxmoe.state_tree import SEPARATOR, is_key, pack, unpack
from sharding.distributed import agree, share


def array_reader(handler: ocp.CheckpointHandler) -> ocp.Checkpointer:
    """Return a reader of arrays without barriers, to be used within `Reading`.

    Args:
        handler: Handler of Orbax, made without multiprocessing options: with them it would change
            what the other handlers of the process write.
    """
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


class Reading:
    """Turns errors of Orbax and TensorStore into a CheckpointDamagedError on all processes.

    Orbax raises plain `Exception` with a long text; the message has its first line. Other errors,
    such as a full memory, pass unchanged. Every process must enter and exit.

    Args:
        where: Name of the checkpoint in messages.
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
    """Return the steps that the first process finds; every process must call this.

    Args:
        find: Function that lists the steps.
    """
    steps = find() if jax.process_index() == 0 else []
    return share(np.asarray(steps, np.int32), jax.process_index() == 0).tolist()


def shared_manifest(read: Callable[[], CheckpointManifest]) -> CheckpointManifest:
    """Return the manifest that the first process reads; every process must call this.

    Args:
        read: Function that reads the manifest.

    Raises:
        CheckpointError: The first process raised it; raised on all processes.
    """
    if jax.process_count() == 1:
        return read()
    sent: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            sent = {"manifest": read().to_json()}
        except CheckpointError as error:
            sent = {"is_damage": isinstance(error, CheckpointDamagedError), "error": str(error)}
    text = np.frombuffer(json.dumps(sent).encode(), np.uint8)
    sent = json.loads(share(text, jax.process_index() == 0).tobytes())
    if "error" in sent:
        raise (CheckpointDamagedError if sent["is_damage"] else CheckpointError)(sent["error"])
    return CheckpointManifest.from_json(sent["manifest"], "the manifest")


def target_of(manifest: CheckpointManifest) -> dict[str, Any]:
    """Return the shapes that a manifest describes; random keys are of the default generator.

    Args:
        manifest: Manifest of the checkpoint.
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


def read_state(
    path: Any, manifest: CheckpointManifest, target: Any, where: str, verify: Verify
) -> Any:
    """Return the state of a step whose files have been checked; every process must call this.

    Args:
        path: Directory of the step.
        manifest: Its manifest.
        target: State of arrays or shapes with shardings; nested dicts of arrays when None.
        where: Name of the checkpoint in messages.
        verify: Whether arrays are compared with their fingerprints ("full").

    Raises:
        CheckpointError: The arrays differ from the target's.
        CheckpointDamagedError: Arrays have changed or cannot be read.
    """
    if target is None:
        if reason := bounds.beyond_memory(manifest.arrays):
            raise CheckpointError(f"{where}: {reason}")
        target = target_of(manifest)
    full_target = target
    target = without_optional(manifest, target)
    check_target(manifest, target, where)
    # Not by a trace, which takes 64 bits of arrays on the host for 32 (JAX 0.11).
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), target)
    packed = pack(shapes)
    shardings = pack(jax.tree.map(sharding_of, target, is_leaf=is_key))
    abstract = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        packed,
        shardings,
    )
    arguments = ocp.args.StandardRestore(abstract)  # pyright: ignore[reportCallIssue]
    with Reading(where), array_reader(ocp.StandardCheckpointHandler()) as reader:
        restored = reader.restore(path / "state", args=arguments)
    return_memory()
    state = unpack(restored, target)
    if verify == "full":
        check_fingerprints(manifest, state, where)
    return with_optional(manifest, state, full_target, where)


def sharding_of(leaf: Any) -> Any:
    """Return the sharding of a leaf; the default device if it has none."""
    placed = getattr(leaf, "sharding", None)
    return placed or jax.sharding.SingleDeviceSharding(jax.devices()[0])
