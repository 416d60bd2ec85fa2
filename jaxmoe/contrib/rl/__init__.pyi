# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.contrib.rl.feed import Learner as Learner
from jaxmoe.contrib.rl.feed import RolloutFeed as RolloutFeed
from jaxmoe.contrib.rl.turns import TurnCodec as TurnCodec
