# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Shardings of whole trees."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def named_shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of NamedSharding from a tree of PartitionSpec.

    Args:
        specs: PartitionSpec leaves.
        mesh: on which they are meant.
    """
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
