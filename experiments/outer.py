# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares methods of low-communication training; see `experiments/studies/outer/command.py`."""

from __future__ import annotations

from experiments.cli.exit import run_command
from experiments.studies.outer.command import main

if __name__ == "__main__":
    run_command(main)
