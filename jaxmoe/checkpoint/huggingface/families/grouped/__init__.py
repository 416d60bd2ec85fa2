# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Families with grouped-query attention in every layer, whose experts are scored by softmax."""
