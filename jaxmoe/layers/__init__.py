# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of a model: mixers, feed-forwards, and the block that joins them; see README.md."""
