# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Balancers: losses that even the load of the experts or limit the router's logits.

To add a balancer: a file in `jaxmoe/routing/balancers/` with its config (see `base.py`), its row
under `balancer` in `jaxmoe/catalog/layers.py`, a row in BALANCER_CASES of
`tests/jaxmoe/routing/test_balancers.py`.
"""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
