# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares SqrtGate with softmax gates; see `experiments/studies/gates/command.py`."""

from __future__ import annotations

import sys

from experiments.studies.gates.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
