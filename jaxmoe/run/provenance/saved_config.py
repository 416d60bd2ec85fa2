# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the config in a checkpoint with that of the start which continues it.

`check_config` (`lineage.py`) compares a start with `config.json`, and both agree where a digit of
the file has changed. The checkpoint says with which config it was trained; a difference is allowed
only where it was asked for: on the command line of this start, or of an earlier one, which
`lineage.json` records as extended.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.checkpoint.migrate import migrate
from jaxmoe.configs import differences, varying_fields
from jaxmoe.run.config import EXTENSION_FIELDS, FIXED_FIELDS, FREE_FIELDS, PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.provenance.lineage import read_lineage
from sharding.distributed import on_first, share


class Change(NamedTuple):
    """A change of a config that was asked for."""

    path: str
    """Dotted path of the field; the fields below it are meant too."""
    value: str | None
    """New value as text; None for any."""
    last_step: int | None
    """Newest step of the checkpoints that the change came after; None for all."""

    def explains(self, path: str, value: str, step: int) -> bool:
        """Return whether the change is why a checkpoint differs.

        Args:
            path: Field that differs.
            value: Its value now.
            step: Step of the checkpoint.
        """
        is_field = path == self.path or path.startswith(f"{self.path}.")
        is_later = self.last_step is None or step <= self.last_step
        return is_field and is_later and self.value in (None, value)


def config_check(
    directory: RunDirectory, config: PretrainConfig, extends: bool | frozenset[str]
) -> Callable[[CheckpointManifest], None]:
    """Return a function that refuses checkpoints of another config; every process must call this.

    Args:
        directory: Run directory; the first process reads it, before the config is recorded.
        config: Config of this start, with the model of its plan.
        extends: Whether the run may be extended; or the fields that the command line names.

    Raises:
        ValueError: A file is damaged.
    """
    failure = f"{directory.path} is damaged, as the first process saw"
    changes = on_first(lambda: _changes(directory, config, extends), failure) or []
    text = np.frombuffer(json.dumps(changes).encode(), np.uint8)
    text = share(text, jax.process_index() == 0).tobytes().decode()
    changes = [Change(*change) for change in json.loads(text)]

    def check(manifest: CheckpointManifest) -> None:
        _check(directory, manifest, config, changes)

    return check


def _changes(
    directory: RunDirectory, config: PretrainConfig, extends: bool | frozenset[str]
) -> list[Change]:
    """Return what this start and the earlier ones have changed."""
    changes = [
        Change(path, value, event.step)
        for event in read_lineage(directory)
        if event.event == "extended"
        for path, _, change in (text.partition(": ") for text in event.changes)
        for value in (change.rpartition(" -> ")[2],)
    ]
    if extends is False:
        return changes
    if isinstance(extends, frozenset):
        changes += [Change(path, None, None) for path in sorted(extends)]
    if directory.has_config():
        found = varying_fields([migrate(directory.config_json()), config])
        changes += [Change(path, values[1], None) for path, values in found.items()]
    return [change for change in changes if _may_change(change.path)]


def _may_change(path: str) -> bool:
    return any(path == field or path.startswith(f"{field}.") for field in EXTENSION_FIELDS)


def _check(
    directory: RunDirectory,
    manifest: CheckpointManifest,
    config: PretrainConfig,
    changes: list[Change],
) -> None:
    if not manifest.config:
        return
    lines = differences(manifest.config, config, FREE_FIELDS, FIXED_FIELDS)
    found: dict[str, Any] = varying_fields([manifest.config, config])
    refused = [
        path
        for path in (line.partition(":")[0] for line in lines)
        if not any(change.explains(path, found[path][1], manifest.step) for change in changes)
    ]
    if not refused:
        return
    shown = "\n  ".join(
        f"{path}: {found[path][0]} in the checkpoint, {found[path][1]} in config.json"
        for path in refused
    )
    way_out = f"write the values of the checkpoint into {directory.config_file}"
    if all(map(_may_change, refused)):
        flags = " ".join(
            f"{path}:{found[path][0]}" if path == "schedule" else f"--{path} {found[path][0]}"
            for path in refused
        )
        way_out += (
            ", or say which ones shall hold: python -m experiments.pretrain resume"
            f" {directory.path} {flags}"
        )
    raise ValueError(
        f"{directory.config_file} is not the config with which step {manifest.step} was trained:\n"
        f"  {shown}\n{way_out}"
    )
