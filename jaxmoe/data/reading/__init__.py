# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds files (`paths`), decompresses them (`compressed`) and reads their records (`formats`).

To add a file format: `jaxmoe/data/reading/formats.py`.
"""
