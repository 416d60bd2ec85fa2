# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Any JAX model on a mesh, from three functions."""
