# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch policies: which instance of a fleet serves a request, and what moves between them.

To add one: a config that extends `DispatchConfig` in a file of its own in this folder, its row
under `dispatch` in `jaxmoe/catalog/serving.py`, its property
in `tests/jaxmoe/contrib/fleet/test_dispatch.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

DISPATCH = Registry("dispatch")
