# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Moves a training state between meshes of the same processes, without touching storage."""

from __future__ import annotations

from typing import Any

import jax

from jaxmoe.run.assemble import Assembly
from jaxmoe.state_tree import flatten
from jaxmoe.training.state import TrainState


def check_movable(running: Assembly) -> None:
    """Refuse runs whose state belongs to the workers of one mesh.

    Args:
        running: Plan, devices and data of the run.

    Raises:
        ValueError: The run has such a state, or several processes.
    """
    replicas = running.plan.config.replicas
    if running.island is not None or replicas.exchanges != "nothing":
        raise ValueError(
            f"replicas {replicas.name!r} keeps a state for each worker: stop the run, and resume it"
            " on the other mesh"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"the arrays of {jax.process_count()} processes cannot be moved to other devices: stop"
            " the run, and resume it on the other mesh"
        )


def check_shapes(shapes: TrainState, target: TrainState) -> None:
    """Raise ValueError unless two states have the same arrays; shardings may differ.

    Args:
        shapes: Shapes of the state.
        target: Shapes on the other mesh.
    """
    found, wanted = (
        {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(tree).items()}
        for tree in (shapes, target)
    )
    differing = [path for path in found | wanted if found.get(path) != wanted.get(path)]
    if differing:
        raise ValueError(
            f"{len(differing)} arrays of the state have other shapes on that mesh, such as"
            f" {differing[0]}: stop the run, and resume it there"
        )


def move_state(leaves: list[Any], target: TrainState) -> TrainState:
    """Return the arrays of a state on the devices of a target, and forget them one by one.

    Args:
        leaves: Arrays in the order of the tree; each is dropped when it has been moved.
        target: Tree of shapes with the shardings wanted.
    """
    wanted, tree = jax.tree.flatten(target)
    moved = []
    for place, leaf in enumerate(wanted):
        moved.append(jax.block_until_ready(jax.device_put(leaves[place], leaf.sharding)))
        leaves[place] = None
    return jax.tree.unflatten(tree, moved)
