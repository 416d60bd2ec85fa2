# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Turns trees of PartitionSpec into trees of NamedSharding."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def named_shardings(specs: Any, mesh: Mesh) -> Any:
    """Return a tree of NamedSharding.

    Args:
        specs: Tree of PartitionSpec.
        mesh: Mesh whose axes they name.
    """
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
