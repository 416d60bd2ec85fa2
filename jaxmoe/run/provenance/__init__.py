# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps what a run has from elsewhere: the run it began from, its extensions, and its tokenizer."""
