# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routing telemetry: load summaries and traces."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
