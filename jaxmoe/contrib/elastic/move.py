# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Moves a training state between meshes of the same processes, without touching storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxmoe.contrib.survival.parity import Peers
from jaxmoe.contrib.survival.pieces import num_words, pack_words, pieces_of
from jaxmoe.contrib.survival.relayout import Parts
from jaxmoe.run.assemble import Assembly
from jaxmoe.state_tree import flatten
from jaxmoe.training.state import TrainState


def check_movable(running: Assembly) -> None:
    """Refuse runs whose state belongs to the workers of one mesh.

    Args:
        running: Plan, devices and data of the run.

    Raises:
        ValueError: The run has such a state.
    """
    if running.execution.optimizer_memory == "files":
        raise ValueError(
            "execution.offload.optimizer=files keeps the optimizer state in files of one mesh: stop"
            " the run, and resume it on the other mesh"
        )
    replicas = running.plan.config.replicas
    if running.job is not None or replicas.exchanges != "nothing":
        raise ValueError(
            f"replicas {replicas.name!r} keeps a state for each worker: stop the run, and resume it"
            " on the other mesh"
        )


def check_shapes(shapes: TrainState, target: TrainState) -> None:
    """Raise ValueError unless two states have the same arrays; shardings may differ.

    Args:
        shapes: Shapes of the state.
        target: Shapes on the other mesh.
    """
    source, target_shapes = (
        {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(tree).items()}
        for tree in (shapes, target)
    )
    differing = [
        path for path in source | target_shapes if source.get(path) != target_shapes.get(path)
    ]
    if differing:
        raise ValueError(
            f"{len(differing)} arrays of the state have other shapes on that mesh, such as"
            f" {differing[0]}: stop the run, and resume it there"
        )


def move_state(leaves: list[Any], target: Any) -> Any:
    """Return the arrays of a state on the devices of a target.

    One process moves array by array from the devices to the devices. JAX does not move arrays of
    several processes to another set of devices: they go through the memory of the hosts.

    Args:
        leaves: Arrays in the order of the tree; dropped when they have been moved.
        target: Tree of shapes with the shardings wanted.
    """
    if jax.process_count() > 1:
        return move_through_hosts(leaves, target)
    shapes, tree = jax.tree.flatten(target)
    moved = []
    for place, leaf in enumerate(shapes):
        moved.append(jax.block_until_ready(jax.device_put(leaves[place], leaf.sharding)))
        leaves[place] = None
    return jax.tree.unflatten(tree, moved)


def move_through_hosts(
    leaves: list[Any],
    target: Any,
    process_of: Callable[[jax.Device], int] = lambda device: device.process_index,
) -> Any:
    """Return the arrays of a state on the devices of a target, in other parts of each process.

    Each process packs its parts; these go to all processes, one process after the other, and each
    takes what it needs. A host holds its parts before and after, and the parts of one process.

    Args:
        leaves: Arrays in the order of the tree; emptied when they have been packed.
        target: Tree of shapes with the shardings wanted.
        process_of: Process of a device.
    """
    tree = jax.tree.structure(target)
    groups: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        groups.setdefault(process_of(device), []).append(device)
    devices = [groups[process] for process in sorted(groups)]
    state = jax.tree.unflatten(tree, leaves)
    pieces = pieces_of(state, devices)
    size = max(map(num_words, pieces))
    local = [place for place, group in enumerate(devices) if group[0] in jax.local_devices()]
    buffers = {place: pack_words(state, pieces[place], size) for place in local}
    del state
    leaves.clear()
    peers = Peers([group[0] for group in devices])
    parts = Parts(target)
    for place in range(len(devices)):
        parts.fill(pieces[place], peers.share_words(place, buffers))
    return parts.state()
