# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Encodings of messages, one file each."""
