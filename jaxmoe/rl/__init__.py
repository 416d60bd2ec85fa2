# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: answers to prompts, their rewards, and batches made from both."""
