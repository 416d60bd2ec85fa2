# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Policies: what runs next, which instance serves a request, what gives way, how many instances."""
