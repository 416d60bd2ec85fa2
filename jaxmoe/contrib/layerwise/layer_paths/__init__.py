# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Paths of single sequences through the layers of a trained model (Dr.LLM, arXiv 2510.12773)."""
