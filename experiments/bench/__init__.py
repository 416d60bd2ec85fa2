# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Command `jaxmoe bench`: measures kernels, routers and training steps."""
