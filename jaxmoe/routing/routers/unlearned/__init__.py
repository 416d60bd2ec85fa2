# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routers without parameters: controls for experiments and benchmarks."""
