# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Formats of few bits, which are fitted to the activations of a model."""
