# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: answers to prompts, their rewards, and batches made from both."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
