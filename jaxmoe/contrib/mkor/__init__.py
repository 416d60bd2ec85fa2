# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of dense matrices between inverse factors of rank-one averages (MKOR)."""
