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
from jaxmoe.serve.policies.batching.batch_llm import BatchLLMConfig as BatchLLMConfig
from jaxmoe.serve.policies.batching.flow_prefill import FlowPrefillConfig as FlowPrefillConfig
from jaxmoe.serve.policies.batching.laps import LapsConfig as LapsConfig
from jaxmoe.serve.policies.batching.layered import LayeredConfig as LayeredConfig
from jaxmoe.serve.policies.batching.nano_batches import NanoBatchesConfig as NanoBatchesConfig
from jaxmoe.serve.policies.batching.nexus import NexusConfig as NexusConfig
from jaxmoe.serve.policies.batching.prefill_first import PrefillFirstConfig as PrefillFirstConfig
from jaxmoe.serve.policies.batching.semi_pd import SemiPDConfig as SemiPDConfig
from jaxmoe.serve.policies.batching.split_fuse import SplitFuseConfig as SplitFuseConfig

BatchingUnion = (
    SplitFuseConfig
    | PrefillFirstConfig
    | LayeredConfig
    | LapsConfig
    | FlowPrefillConfig
    | BatchLLMConfig
    | NexusConfig
    | SemiPDConfig
    | NanoBatchesConfig
)

BATCHING = registry_of(BatchingUnion)
