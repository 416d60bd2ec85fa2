# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.rl.rewards.arithmetic import ArithmeticConfig as ArithmeticConfig
from jaxmoe.rl.rewards.base import Question as Question
from jaxmoe.rl.rewards.base import RewardBase as RewardBase
from jaxmoe.rl.rewards.base import RewardError as RewardError
from jaxmoe.rl.rewards.base import Task as Task
from jaxmoe.rl.rewards.countdown import CountdownConfig as CountdownConfig
from jaxmoe.rl.rewards.function import PythonConfig as PythonConfig
from jaxmoe.rl.rewards.match import MatchConfig as MatchConfig

REWARDS: Registry
