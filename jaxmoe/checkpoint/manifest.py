# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself: schema, step, arrays, config, data position, versions.

It is committed together with the arrays, and read before any of them: a restore compares names,
shapes and dtypes first and lists everything that differs at once, because the store itself would
cast a dtype in silence. The fingerprints of the arrays, taken on the devices before they were
written, are compared with those of what was read (`jaxmoe/fingerprints.py`).

Schema 2 added the fingerprints; checkpoints of schema 1 are read and cannot be verified.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxmoe.checkpoint import bounds
from jaxmoe.checkpoint.migrate import migrate
from jaxmoe.errors import JaxmoeError
from jaxmoe.fingerprints import fingerprints
from jaxmoe.state_tree import SEPARATOR, flatten, is_key

logger = logging.getLogger(__name__)

SCHEMA = 2


class CheckpointError(JaxmoeError, ValueError):
    """A checkpoint that cannot be used as asked."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint that is not what was written."""


class CheckpointAbandonedError(CheckpointError):
    """A checkpoint that its run has left behind."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    """The description committed with a state."""

    step: int
    arrays: dict[str, dict[str, Any]]
    """{path: {"shape": [...], "dtype": "..."}}"""
    config: dict[str, Any]
    """The run's config as JSON."""
    data: dict[str, Any]
    """Data position and fingerprint; empty when the saver gave none."""
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of the arrays by path; empty in schema 1."""
    schema: int = SCHEMA
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> CheckpointManifest:
        """The inverse of `to_json`.

        Raises:
            CheckpointError: written by a newer jaxmoe, or not a manifest.
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
        wrong += [n for n in ("fingerprints", "versions") if not isinstance(data.get(n, {}), dict)]
        if wrong:
            raise CheckpointDamagedError(
                f"{where} has a manifest that is none: see {', '.join(wrong)[:200]}"
            )
        return cls(**{**data, "config": migrate(data["config"])})


def read_manifest(step: pathlib.Path) -> CheckpointManifest:
    """What a step says of itself.

    Args:
        step: its directory.

    Raises:
        CheckpointError: it has no manifest, or one that is none.
    """
    try:
        data = bounds.read_json(step / "manifest" / "metadata")
    except (OSError, ValueError) as error:
        raise CheckpointDamagedError(f"{step} has a manifest that is none: {error}") from error
    return CheckpointManifest.from_json(data, str(step))


def describe(state: Any) -> dict[str, dict[str, Any]]:
    """Shape and dtype of every array of a state, by path."""
    return {path: _describe(leaf) for path, leaf in sorted(flatten(state).items())}


def _describe(leaf: Any) -> dict[str, Any]:
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return {"shape": list(data.shape), "dtype": "key"}
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def make_manifest(
    state: Any, *, step: int, config: Mapping[str, Any], data: Mapping[str, Any]
) -> CheckpointManifest:
    """The manifest of a state about to be saved; every process must call this."""
    packages = ("jaxmoe", "jax", "flax", "optax", "orbax-checkpoint")
    versions = {name: _version(name) for name in packages}
    return CheckpointManifest(
        step=step,
        arrays=describe(state),
        config=dict(config),
        data=dict(data),
        fingerprints=fingerprints(state),
        versions=versions,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def check_target(manifest: CheckpointManifest, target: Any, where: str) -> None:
    """Refuses a target whose arrays are not those of the checkpoint.

    Args:
        manifest: of the checkpoint.
        target: arrays or `jax.ShapeDtypeStruct`.
        where: what to call the checkpoint.

    Raises:
        CheckpointError: with one line per array that is missing, left over or different.
    """
    saved, wanted = manifest.arrays, describe(target)
    lines = []
    for path in sorted(saved.keys() | wanted.keys()):
        if path not in saved:
            near = difflib.get_close_matches(path, saved.keys() - wanted.keys(), 1)
            hint = f" (it has {near[0]})" if near else ""
            lines.append(f"{path}: not in the checkpoint{hint}")
        elif path not in wanted:
            lines.append(f"{path}: in the checkpoint, not wanted")
        elif saved[path] != wanted[path]:
            hint = hint_of(saved[path], wanted[path], manifest.config)
            both = f"saved {spell(saved[path])}, wanted {spell(wanted[path])}"
            lines.append(f"{path}: {both}{hint}")
    if lines:
        shown = "\n  ".join(lines[:20]) + ("\n  ..." if len(lines) > 20 else "")
        raise CheckpointError(
            f"{where} holds another state than the one wanted ({len(lines)} arrays differ):\n"
            f"  {shown}\nrestore it with the model and optimizer it was saved with, or a part of"
            " it, or under other names (jaxmoe.checkpoint.restore.restore_part)"
        )


def hint_of(saved: Mapping[str, Any], wanted: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What may be behind an array that is not the one wanted, in brackets; empty: who knows.

    Args:
        saved: shape and dtype of the one.
        wanted: and of the other.
        config: that the checkpoint was saved with, of a run or of a model.
    """
    one, other = saved["shape"], wanted["shape"]
    if one == other:
        return " (not cast unasked: restore_part with is_cast_allowed)"
    if len(one) != len(other):
        return " (another number of dimensions)"
    if sorted(one) == sorted(other):
        return " (transposed)"
    model = config.get("model", config)
    model = model if isinstance(model, dict) else {}
    moe = model.get("moe")
    known = {
        "number of experts": moe.get("num_experts") if isinstance(moe, dict) else None,
        "vocabulary": model.get("vocab_size"),
        "number of layers": model.get("num_layers"),
    }
    differing = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    for name, size in known.items():
        if len(differing) == 1 and differing[0][0] == size:
            return f" (another {name}: {size}, and {differing[0][1]} here)"
    return ""


def check_global(state: Any) -> None:
    """Refuses a state whose arrays do not lie on one mesh; every process must call this.

    An array of one process alone would be saved by none or by all of them; on one process it shows
    as an array beside the mesh of the others.

    Raises:
        CheckpointError: naming the arrays.
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
            f"{shown}: not a global array, it lies beside the mesh of the others: place it with"
            " jax.device_put and NamedSharding(mesh, PartitionSpec())"
        )


def check_fingerprints(manifest: CheckpointManifest, state: Any, where: str) -> None:
    """Refuses a restored state that is not the one that was saved; every process must call this.

    Args:
        manifest: of the checkpoint.
        state: what was read.
        where: what to call the checkpoint.

    Raises:
        CheckpointDamagedError: naming the arrays.
    """
    if not manifest.fingerprints:
        logger.warning("%s was saved by an older jaxmoe, without fingerprints: not verified", where)
        return
    found = fingerprints(state)
    wrong = [path for path, value in found.items() if manifest.fingerprints.get(path) != value]
    if wrong:
        shown = ", ".join(wrong[:10]) + (", ..." if len(wrong) > 10 else "")
        raise CheckpointDamagedError(
            f"{where} is damaged: {len(wrong)} of {len(found)} arrays are not what was saved: "
            f"{shown}"
        )


def spell(array: Mapping[str, Any]) -> str:
    """An array of a manifest in words: `float32[4,8]`."""
    return f"{array['dtype']}[{','.join(map(str, array['shape']))}]"
