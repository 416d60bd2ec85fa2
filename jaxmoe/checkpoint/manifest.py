# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Describes a checkpoint: schema, step, arrays, config, data position, versions.

The manifest is committed together with the arrays and read before them. A restore first compares
names, shapes and dtypes and lists all differences, because the store would cast dtypes silently.
The fingerprints of arrays (`jaxmoe/fingerprints.py`) are computed on the devices before writing
and compared after reading.

Schema 3 is that of checkpoints of an adapter, which name the model that it adapts.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxmoe.errors import JaxmoeError
from jaxmoe.fingerprints import fingerprints
from jaxmoe.json_bounds import read_json
from jaxmoe.state_tree import SEPARATOR, flatten, is_key

logger = logging.getLogger(__name__)

SCHEMA = 3
_WITHOUT_BASE = 2


class CheckpointError(JaxmoeError, ValueError):
    """A checkpoint that cannot be used as requested."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint whose files or arrays have changed since they were written."""


class CheckpointsLostError(CheckpointError):
    """A run all of whose checkpoints are damaged."""


class CheckpointAbandonedError(CheckpointError):
    """A checkpoint that its run has abandoned by a rollback."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    """Description of a checkpoint."""

    step: int
    arrays: dict[str, dict[str, Any]]
    """Shape and dtype by path: {"shape": [...], "dtype": "..."}."""
    config: dict[str, Any]
    """Config of the run as JSON."""
    data: dict[str, Any]
    """Data position and fingerprint; may be empty."""
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    """Fingerprints of the arrays by path."""
    base: dict[str, Any] | None = None
    """Model that an adapter was trained on: {"path": ..., "step": ..., "fingerprint": ...}; None
    where all parameters are saved."""
    schema: int = _WITHOUT_BASE
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON."""
        fields = dataclasses.asdict(self)
        if self.base is None:
            del fields["base"]
        return fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> CheckpointManifest:
        """Return the manifest of `to_json`.

        Args:
            data: Parsed JSON.
            where: Name of the checkpoint in messages.

        Raises:
            CheckpointError: A newer jaxmoe wrote it, or it is not a manifest.
        """
        schema = data.get("schema") if isinstance(data, dict) else None
        if not isinstance(schema, int):
            raise CheckpointError(f"{where} has no jaxmoe manifest: it was written by another tool")
        if schema > SCHEMA:
            raise CheckpointError(
                f"{where} has schema {schema}, this jaxmoe knows {SCHEMA}: install a newer jaxmoe"
            )
        kinds = {"step": int, "arrays": dict, "config": dict, "data": dict}
        names = {field.name for field in dataclasses.fields(cls)}
        wrong = [name for name, kind in kinds.items() if not isinstance(data.get(name), kind)]
        wrong += sorted(data.keys() - names)
        optional = ("fingerprints", "versions", "base")
        wrong += [name for name in optional if not isinstance(data.get(name, {}), dict)]
        if wrong:
            raise CheckpointDamagedError(
                f"{where} has an invalid manifest: see {', '.join(wrong)[:200]}"
            )
        return cls(**data)


def read_manifest(step: pathlib.Path) -> CheckpointManifest:
    """Return the manifest of a step.

    Args:
        step: Directory of the step.

    Raises:
        CheckpointError: The manifest is missing or invalid.
    """
    try:
        data = read_json(step / "manifest" / "metadata")
    except (OSError, ValueError) as error:
        raise CheckpointDamagedError(f"{step} has an invalid manifest: {error}") from error
    return CheckpointManifest.from_json(data, str(step))


def describe(state: Any) -> dict[str, dict[str, Any]]:
    """Return shape and dtype of every array of a state, by path."""
    return {path: _describe(leaf) for path, leaf in sorted(flatten(state).items())}


def _describe(leaf: Any) -> dict[str, Any]:
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return {"shape": list(data.shape), "dtype": "key"}
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def make_manifest(
    state: Any,
    *,
    step: int,
    config: Mapping[str, Any],
    data: Mapping[str, Any],
    prints: Mapping[str, str] | None = None,
    base: Mapping[str, Any] | None = None,
) -> CheckpointManifest:
    """Return the manifest of a state to save; every process must call this.

    Args:
        state: State, or its shapes and dtypes if `prints` is given.
        step: Number of the checkpoint.
        config: Config of the run as JSON.
        data: Data position.
        prints: Fingerprints of the state; computed when None.
        base: Model that an adapter is trained on; None where all parameters are saved.
    """
    packages = ("jaxmoe", "jax", "flax", "optax", "orbax-checkpoint")
    versions = {name: _version(name) for name in packages}
    return CheckpointManifest(
        step=step,
        arrays=describe(state),
        config=dict(config),
        data=dict(data),
        fingerprints=fingerprints(state) if prints is None else dict(prints),
        versions=versions,
        base=None if base is None else dict(base),
        schema=_WITHOUT_BASE if base is None else SCHEMA,
    )


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def check_target(manifest: CheckpointManifest, target: Any, where: str) -> None:
    """Raise unless the target has the arrays of the checkpoint.

    Args:
        manifest: Manifest of the checkpoint.
        target: Tree of arrays or `jax.ShapeDtypeStruct`.
        where: Name of the checkpoint in messages.

    Raises:
        CheckpointError: One line for each array that is missing, unexpected or different.
    """
    saved = manifest.arrays
    target_arrays = describe(target)
    lines = []
    for path in sorted(saved.keys() | target_arrays.keys()):
        if path not in saved:
            near = difflib.get_close_matches(path, saved.keys() - target_arrays.keys(), 1)
            hint = f" (it has {near[0]})" if near else ""
            lines.append(f"{path}: not in the checkpoint{hint}")
        elif path not in target_arrays:
            lines.append(f"{path}: in the checkpoint, not in the target")
        elif saved[path] != target_arrays[path]:
            hint = hint_of(saved[path], target_arrays[path], manifest.config)
            shapes = f"saved {spell(saved[path])}, wanted {spell(target_arrays[path])}"
            lines.append(f"{path}: {shapes}{hint}")
    if lines:
        shown = "\n  ".join(lines[:20]) + ("\n  ..." if len(lines) > 20 else "")
        raise CheckpointError(
            f"{where} holds another state than the target ({len(lines)} arrays differ):\n"
            f"  {shown}\nrestore it with the model and optimizer it was saved with, or a part of"
            " it, or under other names (jaxmoe.checkpoint.restore.restore_part)"
        )


def hint_of(saved: Mapping[str, Any], target: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the likely cause of a difference between arrays, in brackets; empty if unknown.

    Args:
        saved: Shape and dtype in the checkpoint.
        target: Shape and dtype in the target.
        config: Config of the checkpoint: of a run or of a model.
    """
    saved_shape = saved["shape"]
    target_shape = target["shape"]
    if saved_shape == target_shape:
        return " (cast only by restore_part with is_cast_allowed)"
    if len(saved_shape) != len(target_shape):
        return " (another number of dimensions)"
    if sorted(saved_shape) == sorted(target_shape):
        return " (transposed)"
    model = config.get("model", config)
    model = model if isinstance(model, dict) else {}
    moe = model.get("moe")
    hints = {
        "number of experts": moe.get("num_experts") if isinstance(moe, dict) else None,
        "vocabulary": model.get("vocab_size"),
        "number of layers": model.get("num_layers"),
    }
    differing = [(a, b) for a, b in zip(saved_shape, target_shape, strict=True) if a != b]
    for name, size in hints.items():
        if len(differing) == 1 and differing[0][0] == size:
            return f" (another {name}: {size}, and {differing[0][1]} here)"
    return ""


def check_arrays(state: Any) -> None:
    """Raise unless all leaves of a state are arrays of numbers.

    Raises:
        CheckpointError: The message lists the other leaves.
    """
    wrong = [
        f"state.{path.replace(SEPARATOR, '.')} ({type(leaf).__name__})"
        for path, leaf in flatten(state).items()
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape") or leaf.dtype == object
    ]
    if wrong:
        shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise CheckpointError(
            f"{shown}: not an array of numbers: convert it with jax.numpy.asarray"
        )


def check_json(**values: Any) -> None:
    """Raise unless values can be written as JSON.

    Args:
        **values: Values by the name of the argument of a save.

    Raises:
        CheckpointError: One cannot; the message has its name and the reason.
    """
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{name} cannot be saved as JSON ({error}): give dicts, lists, numbers, text,"
                " booleans and None"
            ) from error


def check_global(state: Any) -> None:
    """Raise unless all arrays of a state are on one mesh; every process must call this.

    An array that is local to a process would be saved by no process or by all of them. With one
    process such an array is on fewer devices than the others.

    Raises:
        CheckpointError: The message lists the arrays.
    """
    arrays = {path: x for path, x in flatten(state).items() if isinstance(x, jax.Array)}
    largest = max((len(x.sharding.device_set) for x in arrays.values()), default=1)
    is_alone = jax.process_count() == 1
    local = [
        f"state.{path.replace(SEPARATOR, '.')}"
        for path, x in arrays.items()
        if (len(x.sharding.device_set) < largest if is_alone else x.is_fully_addressable)
    ]
    if local:
        shown = ", ".join(local[:5]) + (", ..." if len(local) > 5 else "")
        raise CheckpointError(
            f"{shown}: not a global array on the mesh of the others: place it with"
            " jax.device_put and NamedSharding(mesh, PartitionSpec())"
        )


def check_fingerprints(manifest: CheckpointManifest, state: Any, where: str) -> None:
    """Raise unless a restored state equals the saved one; every process must call this.

    Args:
        manifest: Manifest of the checkpoint.
        state: Restored state.
        where: Name of the checkpoint in messages.

    Raises:
        CheckpointDamagedError: The message lists the arrays that differ.
    """
    actual = fingerprints(state)
    wrong = [path for path, value in actual.items() if manifest.fingerprints.get(path) != value]
    if wrong:
        shown = ", ".join(wrong[:10]) + (", ..." if len(wrong) > 10 else "")
        raise CheckpointDamagedError(
            f"{where} is damaged: {len(wrong)} of {len(actual)} arrays have changed since they were"
            f" saved: {shown}"
        )


def check_count(step: int, state: Any, where: str) -> None:
    """Raise unless a training state has consumed as many batches as its checkpoint says.

    Args:
        step: Number of the checkpoint.
        state: Restored state of a run.
        where: Name of the checkpoint in messages.

    Raises:
        CheckpointDamagedError: The state is of another step.
    """
    number = int(state.step.addressable_data(0))
    if number != step:
        raise CheckpointDamagedError(f"{where} is damaged: it holds the state of step {number}")


def spell(array: Mapping[str, Any]) -> str:
    """Return an array of a manifest as text: `float32[4,8]`."""
    return f"{array['dtype']}[{','.join(map(str, array['shape']))}]"
