# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks of reinforcement learning: questions, and rewards of the answers to them.

A reward is a number from 0 to 1. Answers are compared or parsed; text of the model is never
executed.

To add a task: a config that extends `RewardBase` in a file of its own in this folder, its row
under `reward` in `jaxmoe/catalog/runs.py`, its property in
`tests/jaxmoe/contrib/rl/test_rewards.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

REWARDS = Registry("reward")
