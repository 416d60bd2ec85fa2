# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A training run as a library object: config, assembly, directory, restore, training, report."""
