# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Leaves the parameters of an adapted model out of checkpoints, and puts them back.

A checkpoint of an adapter holds what is trained, and names the model that it adapts: its path, its
step and a fingerprint of the parameters left out. A restore reads them from there, and refuses
other ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from flax import traverse_util

from jaxmoe.checkpoint.manifest import CheckpointError, CheckpointManifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseModel:
    """Model that an adapter is trained on."""

    path: str
    """Run directory, directory of checkpoints, or directory of a Hugging Face model."""
    step: int
    fingerprint: str
    """Fingerprint of the parameters that are left out; see `fingerprint_of`."""
    left_out: frozenset[str]
    """Paths of the parameters that checkpoints leave out."""
    load: Callable[[dict[str, Any]], dict[str, Any]]
    """Function from arrays or shapes with shardings, by path, to the parameters."""

    def without(self, state: Any) -> Any:
        """Return a state without the parameters left out.

        Args:
            state: Training state, of arrays or shapes.
        """
        flat = traverse_util.flatten_dict(state.params, sep="/")
        leaves = {path: leaf for path, leaf in flat.items() if path not in self.left_out}
        return dataclasses.replace(state, params=traverse_util.unflatten_dict(leaves, sep="/"))

    def complete(self, state: Any, target: Any) -> Any:
        """Return a restored state with the parameters left out.

        Args:
            state: State restored to `without(target)`.
            target: Training state, of arrays or shapes.
        """
        flat = traverse_util.flatten_dict(target.params, sep="/")
        base = self.load({path: flat[path] for path in sorted(self.left_out)})
        leaves = traverse_util.flatten_dict(state.params, sep="/")
        return dataclasses.replace(
            state, params=traverse_util.unflatten_dict(leaves | base, sep="/")
        )

    def check(self, manifest: CheckpointManifest, where: str) -> None:
        """Refuse a checkpoint of an adapter of another model.

        Args:
            manifest: Manifest of the checkpoint.
            where: Name of the checkpoint in messages.

        Raises:
            CheckpointError: Its fingerprint is another, or it has none.
        """
        if manifest.base is None:
            raise CheckpointError(
                f"{where} holds whole parameters, and model.adapter leaves those of the adapted"
                " model out: train the adapter in another directory"
            )
        if manifest.base.get("fingerprint") != self.fingerprint:
            raise CheckpointError(
                f"{where} adapts {manifest.base.get('path')} step {manifest.base.get('step')}, and"
                f" checkpoint.initial.path={self.path} step {self.step} holds other parameters:"
                " name the model that was adapted with --checkpoint.initial.path and"
                " --checkpoint.initial.step"
            )

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest records."""
        return {"path": self.path, "step": self.step, "fingerprint": self.fingerprint}


def fingerprint_of(prints: Mapping[str, str]) -> str:
    """Return one fingerprint of several arrays.

    Args:
        prints: {path: fingerprint of the array}, as in a manifest.
    """
    lines = "\n".join(f"{path} {prints[path]}" for path in sorted(prints))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]
