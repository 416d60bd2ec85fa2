# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares training in 8 bits with full precision; see `experiments/studies/precision.py`."""

from __future__ import annotations

from experiments.cli.exit import run_command
from experiments.studies.precision import main

if __name__ == "__main__":
    run_command(main)
