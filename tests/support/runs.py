# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the main job, of a model so small that compiling takes longer than training."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

import jax
import numpy as np

from jaxmoe import load_checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]

SMALL = (
    "markov",
    "--model.num_layers",
    "1",
    "--model.embed_dim",
    "16",
    "--model.attention.num_heads",
    "1",
    "--model.attention.num_kv_heads",
    "1",
    "--model.attention.head_dim",
    "16",
    "--model.moe.expert_dim",
    "16",
    "--training.batch_size",
    "8",
    "--training.sequence_length",
    "16",
    "--schedule.warmup_steps",
    "2",
    "--evaluation.batches",
    "2",
    "--optimizer.learning_rate",
    "0.005",
    "--tracking.trackers",
)


def flags(directory: pathlib.Path, steps: int, *more: str) -> list[str]:
    """Flags of a run in this directory."""
    where = ("--run.directory", str(directory), "--training.steps", str(steps))
    return [*SMALL, *where, *more]


def finished_flags(directory: pathlib.Path) -> list[str]:
    """Flags of the finished run that tests of commands share."""
    multiplied = ("--base.embed_dim", "8", "--base.num_layers", "4", "--base.batch_tokens", "128")
    outputs = ("--evaluation.every", "3", "--tracking.sample_length", "5")
    outputs += ("--tracking.trackers", "tensorboard")
    return flags(directory, 6, *outputs, "parameterization:mup_plus_plus", *multiplied)


def start_run(
    arguments: list[str],
    script: str | None = None,
    devices: int = 1,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """The command, or a script that calls it, as a process of its own, with further variables;
    several devices compile fast rather than well."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] = flags if devices > 1 else ""
    environment["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".cache" / "jax")
    environment.update(variables or {})
    return subprocess.Popen(
        [
            sys.executable,
            *(["-c", script] if script else ["-m", "experiments.pretrain"]),
            *arguments,
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def written_by(*processes: subprocess.Popen[str]) -> list[str]:
    """What they write until they end; in time, and they do not outlive a test that ends before."""
    try:
        return [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def saved_leaves(directory: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint of a run, by path."""
    tree = load_checkpoint(directory / "checkpoints", step=step)
    tree["rng"] = jax.random.key_data(tree["rng"])
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}


def logged_losses(directory: pathlib.Path) -> dict[int, float]:
    """By step."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
