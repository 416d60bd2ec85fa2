# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs whose workers communicate rarely, or across slow links between jobs."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
