# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.serve.policies.batching.base import Batching as Batching
from jaxmoe.serve.policies.batching.base import BatchingConfig as BatchingConfig
from jaxmoe.serve.policies.batching.batch_llm import BatchLLMConfig as BatchLLMConfig
from jaxmoe.serve.policies.batching.laps import LapsConfig as LapsConfig
from jaxmoe.serve.policies.batching.prefill_first import PrefillFirstConfig as PrefillFirstConfig
from jaxmoe.serve.policies.batching.split_fuse import SplitFuseConfig as SplitFuseConfig

BATCHING: Registry
