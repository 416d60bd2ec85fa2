# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""THE table of meshes: on every one of them, with every rule set, the loss is the same.

To add a mesh: a row in MESHES. Its sizes must divide the small models of tests/support/models.py:
8 sequences, width 16, 4 heads, 2 key and value heads, 4 experts.
"""

import functools
import math

import jax
from jax.sharding import Mesh

from sharding import MeshConfig, make_mesh
from sharding.rules import RULES

MESHES = {
    "one": MeshConfig(),
    "data2": MeshConfig(data=2),
    "data8": MeshConfig(data=8),
    "data4_tensor2": MeshConfig(data=4, tensor=2),
    "replica2_data2_expert2": MeshConfig(replica=2, data=2, expert=2),
}

LAYOUTS = [(mesh, rules) for mesh in MESHES for rules in RULES]
"""Every mesh with every rule set, for `pytest.mark.parametrize`."""


@functools.cache
def mesh_named(name: str) -> Mesh:
    """The mesh of this row, on the first devices of the eight."""
    config = MESHES[name]
    return make_mesh(config, jax.devices()[: math.prod(config.sizes)])
