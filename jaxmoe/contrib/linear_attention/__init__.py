# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixers with a state in place of attention, beside Mamba; see README.md."""
