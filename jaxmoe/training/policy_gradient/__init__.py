# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Policy gradients: the objective, and the functions of rewards that it is fed with."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
