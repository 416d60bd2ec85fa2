# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients without a backward pass of the whole model: members of the socket `Gradients`."""
