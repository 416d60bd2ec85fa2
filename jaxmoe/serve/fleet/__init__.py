# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Several instances of one model: placements, moves, and the threads of their executors."""
