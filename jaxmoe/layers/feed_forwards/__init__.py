# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Feed-forwards: the half of a layer that computes on each token.

To add a feed-forward: a file jaxmoe/layers/feed_forwards/<name>.py with its config and its module,
its row under `feed_forward` in jaxmoe/catalog/layers.py, its row of FEED_FORWARDS in
tests/jaxmoe/layers/test_member_contract.py, and a test. jaxmoe/layers/README.md has the steps, what
a config has, and an example.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

FEED_FORWARDS = Registry("feed_forward")
ACTIVATIONS = Registry("activation")
