# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measured costs of the steps of a model, for the simulator of serving."""
