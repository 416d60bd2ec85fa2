# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serving without a model: the simulator of policies, and load for a server."""
