# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that share, repeat, leave out or multiply work; see README.md."""
