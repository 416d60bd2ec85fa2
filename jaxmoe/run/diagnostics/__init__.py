# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Diagnoses runs: batches of refused steps, statistics and traces of routers."""
