# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routing: routers, gates, balancers, selection biases, capacities, named methods, telemetry.

`base.py` documents the records and the contract of a router; `README.md` explains the concepts and
adds a router step by step.

To add a router: a file in `jaxmoe/routing/routers/` with its config (extends `base.RouterBase`) and
its router, which the config names (extends `routers.linear.SizedRouter`, or is one of a family),
its row under `router` in `jaxmoe/catalog/layers.py`, a row in ROUTER_CASES of
`tests/support/routers.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

ROUTERS = Registry("router")
GATES = Registry("gate")
BALANCERS = Registry("balancer")
BIASES = Registry("bias")
CAPACITIES = Registry("capacity")
