# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels of grouped_matmul and grouped_outer for GPUs."""
