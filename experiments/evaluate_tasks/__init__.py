# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe evaluate_tasks`: runs tasks of the lm-evaluation-harness."""
