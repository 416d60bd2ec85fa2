# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Families of `transformers`, one file each; `family.py` says what a family is."""
