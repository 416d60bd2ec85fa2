# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Text in and text out: prompts, stop strings, streaming, and pretrained models; see README.md."""
