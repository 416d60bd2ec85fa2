# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps a run alive and honest: lease, watchdog, agreement, snapshots, stragglers, goodput."""
