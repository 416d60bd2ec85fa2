# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges bytes between sites: replicas of a run that are JAX jobs of their own."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
