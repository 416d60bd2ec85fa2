# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.evaluate_tasks`: runs tasks of the lm-evaluation-harness."""
