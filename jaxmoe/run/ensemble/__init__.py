# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates runs on parts of the data as an ensemble."""
