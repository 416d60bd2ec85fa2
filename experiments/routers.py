# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares routing methods on the same data; see `experiments/studies/routers/command.py`."""

from __future__ import annotations

import sys

from experiments.studies.routers.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
