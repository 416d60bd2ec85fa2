# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Families with grouped-query attention whose experts are scored by sigmoid."""
