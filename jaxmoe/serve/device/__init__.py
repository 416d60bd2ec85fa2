# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The part of serving that runs on devices: pages, the step, and the executor of an instance."""
