# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Batching policies: what an instance computes in its next step.

To add one: a config that extends `BatchingConfig` in a file of its own in this folder, the union
`BatchingUnion` here, its name in the row of BATCHING in `tests/test_architecture.py`, a row in
`tests/jaxmoe/serve/policies/test_batching.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.serve.policies.batching.base import Batching as Batching
from jaxmoe.serve.policies.batching.base import BatchingConfig as BatchingConfig
from jaxmoe.serve.policies.batching.prefill_first import PrefillFirstConfig as PrefillFirstConfig
from jaxmoe.serve.policies.batching.split_fuse import SplitFuseConfig as SplitFuseConfig

BatchingUnion = SplitFuseConfig | PrefillFirstConfig

BATCHING = registry_of(BatchingUnion)
