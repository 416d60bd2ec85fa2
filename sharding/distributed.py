# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Processes: starting them, and turning each host's rows into one global array."""

from __future__ import annotations

import os
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.axes import BATCH_AXES, pieces

Tree = TypeVar("Tree")

_CLUSTER_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "SLURM_JOB_NUM_NODES", "TPU_WORKER_HOSTNAMES")


def start_processes() -> None:
    """Joins the other processes of the job, if the environment speaks of any.

    Must run before the first contact with devices. Slurm, TPU pods and JAX_COORDINATOR_ADDRESS
    are recognised by `jax.distributed`; anything else is a single process.
    """
    named = [name for name in _CLUSTER_VARIABLES if os.environ.get(name)]
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    is_single = named == ["TPU_WORKER_HOSTNAMES"] and "," not in hosts
    is_single |= named == ["SLURM_JOB_NUM_NODES"] and os.environ["SLURM_JOB_NUM_NODES"] == "1"
    if named and not is_single:
        jax.distributed.initialize()


def global_batch(rows: Tree, mesh: Mesh) -> Tree:
    """Global arrays from the rows that this process read.

    Args:
        rows: pytree of numpy arrays `[B / processes, ...]`, the same order on every process.
        mesh: a mesh of `sharding.make_mesh`; rows are spread over its batch axes.
    """

    def place(array: np.ndarray) -> jax.Array:
        spec = PartitionSpec(pieces(mesh.axis_names, BATCH_AXES), *(None,) * (array.ndim - 1))
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), array)

    return jax.tree.map(place, rows)


def agree(code: int) -> int:
    """The largest of the processes' numbers, on all of them; each must call this.

    Args:
        code: of this process.
    """
    return int(np.max(gather(np.asarray([code], np.int32))))


def gather(values: np.ndarray) -> np.ndarray:
    """The values of all processes, `[processes, ...]`, on all of them; each must call this.

    Args:
        values: of this process, of the same shape and at most 32 bits on each.
    """
    if jax.process_count() == 1:
        return values[None]
    return np.asarray(multihost_utils.process_allgather(values))
