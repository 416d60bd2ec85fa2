# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Comparisons of trials: learning-rate transfer, gates, routers, workers, precision."""
