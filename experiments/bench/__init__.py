# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Command `python -m experiments.bench`: measures kernels, routers and training steps."""
