# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products of sharded arrays: tensor parallelism, quantised weights, whole matrices of a stack."""
