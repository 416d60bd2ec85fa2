# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that one published family of models has."""
