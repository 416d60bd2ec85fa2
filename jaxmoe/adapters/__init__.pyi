# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.adapters.base import Adapter as Adapter
from jaxmoe.adapters.base import StepGiven as StepGiven
from jaxmoe.adapters.base import TargetsConfig as TargetsConfig
from jaxmoe.adapters.fold import fold_adapters as fold_adapters
from jaxmoe.adapters.fold import is_factor as is_factor
from jaxmoe.adapters.fold import plain as plain
from jaxmoe.adapters.fold import with_base as with_base
from jaxmoe.adapters.lora import LoraConfig as LoraConfig
from jaxmoe.adapters.select import SelectConfig as SelectConfig
from jaxmoe.catalog import Registry
from jaxmoe.contrib.adapters.adalora import AdaLoraConfig as AdaLoraConfig
from jaxmoe.contrib.adapters.lift import LiftConfig as LiftConfig
from jaxmoe.contrib.adapters.lora_mixer import LoraMixerConfig as LoraMixerConfig
from jaxmoe.contrib.adapters.mixture_of_shards import MixtureOfShardsConfig as MixtureOfShardsConfig
from jaxmoe.contrib.adapters.multi_head_routing import (
    MultiHeadRoutingConfig as MultiHeadRoutingConfig,
)
from jaxmoe.contrib.adapters.quantised_choices import (
    QuantisedChoicesConfig as QuantisedChoicesConfig,
)
from jaxmoe.contrib.adapters.remix import RemixConfig as RemixConfig
from jaxmoe.contrib.adapters.shared_store import SharedStoreConfig as SharedStoreConfig
from jaxmoe.contrib.adapters.switch_lora import SwitchLoraConfig as SwitchLoraConfig
from jaxmoe.contrib.adapters.task_lora import TaskLoraConfig as TaskLoraConfig
from jaxmoe.contrib.adapters.task_lora import check_together as check_together
from jaxmoe.contrib.adapters.task_lora import together as together

ADAPTERS: Registry
