# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Training steps of workers that communicate rarely: states, local steps, exchanges, metrics."""
