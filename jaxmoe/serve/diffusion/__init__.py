# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serving of masked-diffusion models: rows at different steps, filled in together."""
