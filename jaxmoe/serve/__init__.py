# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serving: an instance's state machine, pages, batching policies."""

from jaxmoe.serve.blocks import BlockPool as BlockPool
from jaxmoe.serve.facts import Facts as Facts
from jaxmoe.serve.facts import Part as Part
from jaxmoe.serve.instance import Instance as Instance
from jaxmoe.serve.plan import Lane as Lane
from jaxmoe.serve.plan import Piece as Piece
from jaxmoe.serve.plan import Plan as Plan
from jaxmoe.serve.plan import PlanError as PlanError
from jaxmoe.serve.plan import Shapes as Shapes
from jaxmoe.serve.policies.batching import BATCHING as BATCHING
from jaxmoe.serve.requests import End as End
from jaxmoe.serve.requests import Event as Event
from jaxmoe.serve.requests import Objective as Objective
from jaxmoe.serve.requests import Request as Request
from jaxmoe.serve.requests import Result as Result
from jaxmoe.serve.requests import Sampling as Sampling
from jaxmoe.serve.requests import Token as Token
from jaxmoe.serve.step import Step as Step
from jaxmoe.serve.step import Work as Work
from jaxmoe.serve.view import InstanceView as InstanceView
