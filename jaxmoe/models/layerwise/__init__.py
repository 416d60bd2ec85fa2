# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models computed layer by layer: chains of programs, layers in host memory, parallel sweeps."""
