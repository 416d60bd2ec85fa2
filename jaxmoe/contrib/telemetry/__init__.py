# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what training does inside: layers, routers, gradients of workers."""
