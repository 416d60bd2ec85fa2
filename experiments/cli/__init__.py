# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Flags, output, exit codes and process set-up shared by the commands."""
