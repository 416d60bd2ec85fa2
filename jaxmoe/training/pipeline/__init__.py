# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Pipelines of a model: stages, gradients of a step, layers left out."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
