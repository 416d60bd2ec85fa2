# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A training run as a library object: configuration, assembly, directory, training, report."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
