# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The commands, `jaxmoe NAME`, and their recipes."""
