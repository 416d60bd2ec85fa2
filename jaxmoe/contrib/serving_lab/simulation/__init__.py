# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Simulator of serving: the same instances and policies, on a model of the time of a step."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
