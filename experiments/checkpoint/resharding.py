# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rewrites a checkpoint: a part of it, under other names, or in another dtype.

    jaxmoe checkpoint reshard RUN --to DIR --keep params
    jaxmoe checkpoint reshard RUN --to DIR --mapping names.py

A checkpoint restores on any mesh without conversion; this command is for other layouts. A mapping
is a Python file with `RULES` (see jaxmoe/checkpoint/mapping.py); every array must match one rule.
The input is verified. The output is a directory of checkpoints with one step and the same config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import traverse_util

from experiments.checkpoint.verify import CheckpointsConfig
from experiments.cli import flags as cli
from experiments.cli.model import with_about, with_model
from experiments.cli.output import say
from experiments.cli.process import start_process
from jaxmoe.checkpoint import save_checkpoint
from jaxmoe.checkpoint.mapping import read_rules
from jaxmoe.checkpoint.restore import read_mapped
from jaxmoe.tracking.console import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReshardConfig:
    """Source and target of the rewrite."""

    run: CheckpointsConfig = CheckpointsConfig()
    """Checkpoint; the newest step by default."""
    to: str | None = None
    """Directory of checkpoints to write, which must not have the step."""
    keep: Literal["all", "params"] = "all"
    """All arrays, or only the parameters."""
    mapping: str | None = None
    """Python file with `RULES`: see jaxmoe/checkpoint/mapping.py."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of floating-point parameters; unchanged when None."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe checkpoint reshard"
    config = cli.parse_flags(ReshardConfig(), with_model(argv), prog, with_about(__doc__))
    with cli.exit_on_bad_configuration():
        start_process()
        say(rewrite(config))
    return int(cli.ExitCode.DONE)


def rewrite(config: ReshardConfig) -> str:
    """Write the new checkpoint.

    Args:
        config: Source and target.

    Returns:
        A report for the user.

    Raises:
        ValueError: The checkpoint is missing or damaged, the mapping does not fit, or the target
            has the step.
    """
    if config.to is None:
        raise ValueError("reshard needs --to DIR: where to write")
    if jax.process_count() > 1:
        raise ValueError("reshard runs in one process: start it on one host")
    manager, steps = config.run.open()
    step = steps[-1]
    rules = () if config.mapping is None else read_rules(config.mapping, "mapping")
    arrays = read_mapped(manager.directory, step, mapping=rules)
    manifest = manager.manifest(step)
    manager.close()
    if config.keep == "params":
        arrays = {path: x for path, x in arrays.items() if path.startswith("params/")}
        if not arrays:
            raise ValueError(f"{manager.directory}/{step} has nothing under params/ to keep")
    if config.dtype is not None:
        arrays = {path: _cast(path, x, config.dtype) for path, x in arrays.items()}
    tree = traverse_util.unflatten_dict(arrays, sep="/")
    save_checkpoint(config.to, tree, step=step, config=manifest.config, data=manifest.data)
    total = sum(leaf.nbytes for leaf in arrays.values())
    return f"{config.to}/{step}: {len(arrays)} arrays, {format_bytes(total)}"


def _cast(path: str, x: Any, dtype: str) -> Any:
    is_parameter = path.startswith("params/") and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(dtype) if is_parameter else x
