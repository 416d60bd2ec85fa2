# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exact attention over a sequence that several devices share; queries and results travel."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
