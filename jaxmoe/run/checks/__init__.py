# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a run before anything is compiled."""

from jaxmoe.run.checks.mesh import check_mesh as check_mesh
