# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Meshes, layout rules, regions, and the movement of arrays between devices."""

from sharding.fold import MoEMesh as MoEMesh
from sharding.mesh import MeshConfig as MeshConfig
from sharding.mesh import abstract_mesh as abstract_mesh
from sharding.mesh import make_mesh as make_mesh
