# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routers by family; the union of their configs is in `jaxmoe/routing/__init__.py`."""
