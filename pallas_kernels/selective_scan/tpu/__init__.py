# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels of state_space_dual for TPUs."""
