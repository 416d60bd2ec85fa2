# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges bytes between islands: replicas of a run that are JAX jobs of their own."""

from jaxmoe.islands.config import KEY_VARIABLE as KEY_VARIABLE
from jaxmoe.islands.config import VARIABLE as VARIABLE
from jaxmoe.islands.config import IslandConfig as IslandConfig
from jaxmoe.islands.config import connect as connect
from jaxmoe.islands.errors import FrameError as FrameError
from jaxmoe.islands.errors import IslandError as IslandError
from jaxmoe.islands.errors import LeftOutError as LeftOutError
from jaxmoe.islands.errors import QuorumError as QuorumError
from jaxmoe.islands.errors import StoppedError as StoppedError
from jaxmoe.islands.errors import TransportError as TransportError
from jaxmoe.islands.frames import Kind as Kind
from jaxmoe.islands.rounds import Rounds as Rounds
from jaxmoe.islands.rules import Agreement as Agreement
from jaxmoe.islands.rules import Round as Round
from jaxmoe.islands.transport import Closing as Closing
from jaxmoe.islands.transport import Collected as Collected
from jaxmoe.islands.transport import MessageSizes as MessageSizes
from jaxmoe.islands.transport import Transport as Transport
