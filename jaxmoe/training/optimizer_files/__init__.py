# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Optimiser state in memory-mapped files, which a step reads and writes part by part."""
