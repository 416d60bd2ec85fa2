# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares SqrtGate with softmax gates; see `experiments/studies/gates/command.py`."""

from __future__ import annotations

from experiments.cli.exit import run_command
from experiments.studies.gates.command import main

if __name__ == "__main__":
    run_command(main)
