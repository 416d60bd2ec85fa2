# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sweeps the learning rate at several sizes; see `experiments/studies/transfer/command.py`."""

from __future__ import annotations

from experiments.cli.exit import run_command
from experiments.studies.transfer.command import main

if __name__ == "__main__":
    run_command(main)
