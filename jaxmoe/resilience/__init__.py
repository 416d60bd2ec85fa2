# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps runs alive: lease, watchdog, agreement, stragglers and goodput."""
