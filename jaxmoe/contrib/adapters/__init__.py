# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters beside LoRA, additions that differ from token to token, and averages of parameters."""
