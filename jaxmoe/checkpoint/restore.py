# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Restores a part of a checkpoint, or a checkpoint with another layout.

    params = restore_part(directory, {"params": shapes})["params"]     # without optimiser state
    state = restore_part(directory, target, mapping=[Rename("model/{p...}", "params/{p}")])

Arrays have their names of the manifest, which `jaxmoe checkpoint inspect` shows. Each is read
directly to the target's sharding; merged arrays are assembled on the host, one at a time.
Arrays that the target does not name are not read. Arrays are compared with their fingerprints after
reading. Dtypes are cast only with `is_cast_allowed`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util
from jaxtyping import Array

from jaxmoe.checkpoint import bounds
from jaxmoe.checkpoint.manager import CheckpointManager, Verify
from jaxmoe.checkpoint.manifest import (
    CheckpointError,
    CheckpointManifest,
    check_fingerprints,
    describe,
    hint_of,
    spell,
)
from jaxmoe.checkpoint.mapping import MappingRule, Merged, Rename, plan_mapping
from jaxmoe.checkpoint.reading import Reading, array_reader, sharding_of
from jaxmoe.state_tree import SEPARATOR, flatten, is_key, unpack

logger = logging.getLogger(__name__)


def restore_part(
    directory: Any,
    target: Any,
    *,
    step: int | None = None,
    mapping: Sequence[MappingRule] = (),
    is_cast_allowed: bool = False,
    verify: Verify = "full",
) -> Any:
    """Restore the arrays of a target from a checkpoint that may hold further or other arrays.

    Args:
        directory: Directory of the checkpoints of a run.
        target: Tree of arrays or `jax.ShapeDtypeStruct` with shardings.
        step: Step to read; the newest with undamaged files when None.
        mapping: Rules from names of the checkpoint to names of the target; empty: same names.
        is_cast_allowed: Whether arrays are cast to the dtype of the target.
        verify: Checks of the restore.

    Returns:
        The target with the restored arrays.

    Raises:
        CheckpointError: Arrays are missing or of another shape or dtype (all are listed), the
            mapping does not fit, or the checkpoint is damaged.
    """
    read = _open(directory, step, verify)
    manifest = read.manifest
    where = read.where
    sources = _sources(manifest, mapping)
    leaves = dict(sorted(flatten(target).items()))
    _check(manifest, leaves, sources, where, is_cast_allowed)
    packed = {}
    for path, leaf in leaves.items():
        placed = sharding_of(leaf)
        merged = sources[path]
        if not merged.is_renamed:
            array = jax.device_put(merged.build(read, path), placed)
            shape = describe({"x": leaf})["x"]["shape"]
            if list(array.shape) != shape:
                raise CheckpointError(
                    f"{where}: {path} was merged to {list(array.shape)}, and the target has {shape}"
                )
        else:
            (name,) = merged.sources
            array = read(name, placed)
        packed[path] = array if is_key(leaf) else array.astype(leaf.dtype)
    items = {name.split(SEPARATOR)[0] for path in leaves for name in sources[path].sources}
    unread = sorted({path.split(SEPARATOR)[0] for path in manifest.arrays} - items)
    if unread:
        logger.info("%s: not read: %s", where, ", ".join(unread))
    return unpack(traverse_util.unflatten_dict(packed, sep=SEPARATOR), target)


def read_mapped(
    directory: Any, step: int, *, mapping: Sequence[MappingRule] = (), verify: Verify = "full"
) -> dict[str, Array]:
    """Return every array of a checkpoint by its name after a mapping, on one device.

    Args:
        directory: Directory of the checkpoints of a run.
        step: Step to read.
        mapping: See `restore_part`.
        verify: Checks of the restore.

    Raises:
        CheckpointError: The mapping does not fit, or the checkpoint is damaged.
    """
    read = _open(directory, step, verify)
    manifest = read.manifest
    if reason := bounds.beyond_memory(manifest.arrays):
        raise CheckpointError(f"{read.where}: {reason}")
    arrays = {}
    for path, merged in _sources(manifest, mapping).items():
        names = merged.sources
        is_key_array = manifest.arrays[names[0]]["dtype"] == "key"
        array = read(names[0]) if merged.is_renamed else jnp.asarray(merged.build(read, path))
        arrays[path] = jax.random.wrap_key_data(array) if is_key_array else array
    return arrays


def whole_step(
    directory: Any, step: int | None, verify: Verify = "full"
) -> tuple[epath.Path, CheckpointManifest]:
    """Return the path and the manifest of a step with undamaged files.

    Args:
        directory: Directory of all steps.
        step: Step to open; the newest undamaged one when None.
        verify: Checks of the files.

    Raises:
        CheckpointError: There is no such step, or it is damaged.
    """
    manager = CheckpointManager(directory, is_writer=False, verify=verify)
    try:
        if step is not None:
            manager.check_files(step)
        elif (step := manager.newest_whole_step()) is None:
            raise CheckpointError(f"{directory} holds no undamaged checkpoint")
        return manager.directory / str(step), manager.shared_manifest(step)
    finally:
        manager.close()


def _open(directory: Any, step: int | None, verify: Verify) -> _Reader:
    path, manifest = whole_step(directory, step, verify)
    return _Reader(path / "state", manifest, str(path), verify == "full")


class _Reader:
    """Reads arrays of one step by name, and compares them with their fingerprints."""

    def __init__(self, state: Any, manifest: CheckpointManifest, where: str, is_verified: bool):
        self._state = state
        self.manifest = manifest
        self.where = where
        self._is_verified = is_verified
        self._checkpointer = array_reader(ocp.PyTreeCheckpointHandler())

    def __call__(self, name: str, placed: Any = None) -> Array:
        placed = placed or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        saved = self.manifest.arrays[name]
        dtype = "uint32" if saved["dtype"] == "key" else saved["dtype"]
        shape = jax.ShapeDtypeStruct(tuple(saved["shape"]), jnp.dtype(dtype), sharding=placed)
        item = traverse_util.unflatten_dict({name: shape}, sep=SEPARATOR)
        arguments = ocp.checkpoint_utils.construct_restore_args(item)
        with Reading(self.where):
            restored = self._checkpointer.restore(
                self._state,
                args=ocp.args.PyTreeRestore(  # pyright: ignore[reportCallIssue]
                    item=item, restore_args=arguments, partial_restore=True
                ),
            )
        array = cast(Array, traverse_util.flatten_dict(restored, sep=SEPARATOR)[name])
        if self._is_verified:
            tree = traverse_util.unflatten_dict({name: array}, sep=SEPARATOR)
            check_fingerprints(self.manifest, tree, self.where)
        return array


def _sources(manifest: CheckpointManifest, mapping: Sequence[MappingRule]) -> Mapping[str, Merged]:
    if mapping:
        return plan_mapping(mapping, manifest.arrays)
    return {path: Merged(Rename(path, path), (path,)) for path in manifest.arrays}


def _check(
    manifest: CheckpointManifest,
    leaves: Mapping[str, Any],
    sources: Mapping[str, Merged],
    where: str,
    is_cast_allowed: bool,
) -> None:
    """Raise for arrays that are missing or of another shape or dtype, before reading any."""
    lines = []
    for path, leaf in describe(traverse_util.unflatten_dict(dict(leaves), sep=SEPARATOR)).items():
        if path not in sources:
            near = difflib.get_close_matches(path, sources, 1)
            hint = f" (it has {near[0]})" if near else ""
            lines.append(f"{path}: not in the checkpoint{hint}")
            continue
        pieces = [manifest.arrays[name] for name in sources[path].sources]
        saved = pieces[0]
        if sources[path].rule.keeps_shape and saved["shape"] != leaf["shape"]:
            hint = hint_of(saved, leaf, manifest.config)
            lines.append(f"{path}: saved {spell(saved)}, wanted {spell(leaf)}{hint}")
            continue
        dtypes = {piece["dtype"] for piece in pieces}
        is_castable = is_cast_allowed and "key" not in (*dtypes, leaf["dtype"])
        if dtypes != {leaf["dtype"]} and not is_castable:
            dtypes_text = " and ".join(sorted(dtypes))
            lines.append(
                f"{path}: saved {dtypes_text}, wanted {leaf['dtype']}, not cast unless"
                f" is_cast_allowed"
            )
    if lines:
        shown = "\n  ".join(lines[:20]) + ("\n  ..." if len(lines) > 20 else "")
        raise CheckpointError(f"{where} lacks what is wanted ({len(lines)} arrays):\n  {shown}")
