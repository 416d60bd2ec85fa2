# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks of reinforcement learning: questions, and rewards of the answers to them.

A reward is a number from 0 to 1. Answers are compared or parsed; text of the model is never
executed.

To add a task: a config that extends `RewardBase` in a file of its own in this folder, the union
`RewardConfig` here, its name in the row of REWARDS in `tests/test_architecture.py`, its property in
`tests/jaxmoe/rl/test_rewards.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.rl.rewards.arithmetic import ArithmeticConfig as ArithmeticConfig
from jaxmoe.rl.rewards.base import Question as Question
from jaxmoe.rl.rewards.base import RewardError as RewardError
from jaxmoe.rl.rewards.base import Task as Task
from jaxmoe.rl.rewards.countdown import CountdownConfig as CountdownConfig
from jaxmoe.rl.rewards.function import PythonConfig as PythonConfig
from jaxmoe.rl.rewards.match import MatchConfig as MatchConfig

RewardConfig = ArithmeticConfig | CountdownConfig | MatchConfig | PythonConfig
"""Where prompts come from, and how their answers are scored."""

REWARDS = registry_of(RewardConfig)
