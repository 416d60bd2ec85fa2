# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Passes over the rows of a step that an adapter compares with each other; see `rows.py`."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
