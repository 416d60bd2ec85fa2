# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Opens runs on parts of one partition, and computes the loss of each held-out token under each.

One run is in memory at a time. All runs are computed on the held-out batches of the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmoe.configs import varying_fields
from jaxmoe.contrib.ensembles.clusters import Clusters
from jaxmoe.contrib.ensembles.kept_partition import partition_of
from jaxmoe.contrib.ensembles.mixture import make_token_nll
from jaxmoe.contrib.ensembles.partition import Partition
from jaxmoe.data import Batch, evaluation_batches
from jaxmoe.run.assemble import Assembly, entropy_floor
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import restore_run
from jaxmoe.run.provenance.saved import at_execution, on_data, saved_config
from jaxmoe.training.state import TrainState
from sharding.distributed import global_batch
from sharding.mesh import MeshConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnsembleMember:
    """One run, and its loss of each held-out token."""

    path: str
    """Run directory."""
    step: int
    """Step of the checkpoint."""
    partition: Partition
    """Part of the data that it was trained on."""
    nll: np.ndarray
    """Nll of each target [batches B S], nats."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnsembleMembers:
    """Runs on parts of one partition, and their common held-out batches."""

    members: tuple[EnsembleMember, ...]
    batches: tuple[Batch, ...]
    bytes_per_token: float | None
    """Bytes of held-out text per token; None where tokens are not text."""
    entropy_floor: float | None
    """Lowest possible loss in bits per token; None where it is unknown."""

    @property
    def clusters(self) -> Clusters:
        """Centroids of all parts."""
        return self.members[0].partition.clusters

    @property
    def parts(self) -> tuple[int, ...]:
        """Part of each member, from 0."""
        return tuple(member.partition.part for member in self.members)


def open_members(
    paths: Sequence[str], *, batches: int | None = None, mesh: MeshConfig | None = None
) -> EnsembleMembers:
    """Return the losses of runs on parts of one partition.

    Args:
        paths: Run directories.
        batches: Number of held-out batches; that of the first run when None.
        mesh: Mesh to use; that of each run when None.

    Raises:
        ValueError: A run has no partition, or differs from the first in tokens, held-out data,
            length or centroids; there is no checkpoint; or several processes are used.
    """
    if jax.process_count() > 1:
        raise ValueError("an ensemble is evaluated by one process: start the command on one host")
    configs = [at_execution(saved_config(path), path, mesh) for path in paths]
    for path, config in zip(paths, configs, strict=True):
        _check_config(path, config, paths[0], configs[0])
    first: Assembly | None = None
    rows: tuple[Batch, ...] = ()
    members = []
    for path, config in zip(paths, configs, strict=True):
        config = on_data(config, RunDirectory(path), batches=batches)
        assembly, state, step = restore_run(config, RunDirectory(path), None)
        if first is None:
            first = assembly
            rows = _held_out(assembly)
        partition = checked_partition(path, assembly, paths[0], first)
        nll = _token_nll(assembly, state, rows)
        members.append(EnsembleMember(path=path, step=step, partition=partition, nll=nll))
    assert first is not None  # the command refuses an empty list
    return EnsembleMembers(
        members=tuple(members),
        batches=rows,
        bytes_per_token=first.source.bytes_per_token,
        entropy_floor=entropy_floor(first),
    )


def _check_config(
    path: str, config: PretrainConfig, other_path: str, first: PretrainConfig
) -> None:
    """Refuse a run that cannot be a member, before anything of it is read.

    Args:
        path: Run directory.
        config: Its configuration.
        other_path: Run directory of the first member.
        first: Its configuration.
    """
    if getattr(config.data, "partition", None) is None:
        raise ValueError(
            f"{path} was trained on all of its data (data:{config.data.name}), and has no part to"
            " be routed by: train each member with --data.partition.part 1/4 and so on"
        )
    if not config.model.attention.is_causal:
        raise ValueError(
            f"{path} holds a model that is not causal (model.attention.is_causal=False), which has"
            " no likelihood of the next token"
        )
    config.execution.check_one_stage(f"{path} is a member of an ensemble, which has whole models")
    length = config.training.sequence_length
    first_length = first.training.sequence_length
    if length != first_length:
        raise ValueError(
            f"{path} has training.sequence_length={length}, and {other_path} {first_length}: an"
            f" ensemble predicts"
            " the same tokens from the same rows"
        )


def checked_partition(path: str, assembly: Assembly, other_path: str, first: Assembly) -> Partition:
    """Return the partition of a member, the centroids as its directory keeps them.

    Raises:
        ValueError: It differs from the first member in vocabulary, data or centroids.
    """
    own_source = assembly.source
    first_source = first.source
    if own_source.vocab_size != first_source.vocab_size:
        raise ValueError(
            f"{path} has a vocabulary of {own_source.vocab_size} ids, and {other_path} of"
            f" {first_source.vocab_size}:"
            " an ensemble needs one tokenizer"
        )
    prints = [_held_out_print(source.fingerprint()) for source in (first_source, own_source)]
    if differing := varying_fields(prints):
        lines = [
            f"  {name}: {clusters} in {other_path}, {two} in {path}"
            for name, (clusters, two) in differing.items()
        ]
        raise ValueError("\n".join(["the runs were trained on other data:", *lines]))
    partition = partition_of(own_source)
    first_partition = partition_of(first_source)
    assert partition is not None and first_partition is not None  # their configs have a part
    file = RunDirectory(path).partition_file
    if file.exists():
        partition = dataclasses.replace(partition, clusters=Clusters.read(file))
    clusters, two = (each.clusters for each in (partition, first_partition))
    if clusters.digest() != two.digest():
        raise ValueError(
            f"{path} is {partition.describe()} with centroids {clusters.digest()[:12]}, and"
            f" {other_path} is"
            f" {first_partition.describe()} with centroids {two.digest()[:12]}: the members of"
            f" an ensemble"
            " share one partition"
        )
    return partition


def _held_out_print(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies tokens and held-out data in a fingerprint.

    The training data are identified by the centroids, and the order of rows may differ.
    """
    left_out = {"partition", "seed", *(("train",) if "validation" in fingerprint else ())}
    return {key: value for key, value in fingerprint.items() if key not in left_out}


def _held_out(assembly: Assembly) -> tuple[Batch, ...]:
    """Return the held-out batches of a run on the host."""
    config = assembly.plan.config
    return tuple(
        evaluation_batches(
            assembly.source,
            batch_size=config.held_out_batch_size,
            sequence_length=config.training.sequence_length,
            num_batches=config.evaluation.batches,
        )
    )


def _token_nll(assembly: Assembly, state: TrainState, batches: Sequence[Batch]) -> np.ndarray:
    """Return the nll of each target [batches B S] in float64."""
    with jax.set_mesh(assembly.mesh):
        step = make_token_nll(assembly.plan.model, assembly.execution)
        losses = [
            jax.device_get(
                step(state.params, state.router_state, global_batch(batch, assembly.mesh))
            )
            for batch in batches
        ]
    return np.stack(losses).astype(np.float64)
