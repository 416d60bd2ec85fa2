# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Whole models: configuration, forward pass, decoding, sizes; see README.md."""
