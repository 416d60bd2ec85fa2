# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.rl.rewards.arithmetic import ArithmeticConfig as ArithmeticConfig
from jaxmoe.contrib.rl.rewards.base import Question as Question
from jaxmoe.contrib.rl.rewards.base import RewardBase as RewardBase
from jaxmoe.contrib.rl.rewards.base import RewardError as RewardError
from jaxmoe.contrib.rl.rewards.base import RewardTask as RewardTask
from jaxmoe.contrib.rl.rewards.countdown import CountdownConfig as CountdownConfig
from jaxmoe.contrib.rl.rewards.function import PythonConfig as PythonConfig
from jaxmoe.contrib.rl.rewards.match import MatchConfig as MatchConfig

REWARDS: Registry
