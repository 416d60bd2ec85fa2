# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Shows the content of a checkpoint.

    jaxmoe checkpoint inspect runs/pretrain/tiny [--run.step 400]

Prints the steps, and for one step (the newest by default) shape, dtype, bytes and fingerprint of
every array, and the versions that wrote it. Arrays are not read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from experiments.checkpoint.verify import CheckpointsConfig
from experiments.cli import flags as cli
from experiments.cli.model import with_about, with_model
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.tracking.console import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InspectConfig:
    """Checkpoint to inspect."""

    run: CheckpointsConfig = CheckpointsConfig()
    """Checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe checkpoint inspect"
    config = cli.parse_flags(InspectConfig(), with_model(argv), prog, with_about(__doc__))
    with cli.exit_on_bad_configuration():
        start_process()
        manager, steps = config.run.open()
        text = in_words(manager.manifest(steps[-1]))
    say(f"{manager.directory}: steps {', '.join(map(str, manager.steps()))}\n\n{text}")
    manager.close()
    return int(cli.ExitCode.DONE)


def in_words(manifest: CheckpointManifest) -> str:
    """Return a manifest as a table and a few lines."""
    lines = [("array", "shape", "dtype", "bytes", "fingerprint")]
    for path, array in manifest.arrays.items():
        shape = "x".join(map(str, array["shape"])) or "-"
        prints = manifest.fingerprints.get(path, "-")
        lines.append((path, shape, array["dtype"], format_bytes(_bytes(array)), prints))
    total = sum(map(_bytes, manifest.arrays.values()))
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    return "\n".join(
        [
            text_table(lines),
            f"step {manifest.step}, schema {manifest.schema}: {len(manifest.arrays)} arrays,"
            f" {format_bytes(total)}",
            f"written by {versions}",
        ]
    )


def _bytes(array: dict) -> int:
    dtype = "uint32" if array["dtype"] == "key" else array["dtype"]
    return math.prod(array["shape"]) * jnp.dtype(dtype).itemsize
