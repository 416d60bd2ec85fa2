# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Members of the choices of an execution: products, and where tokens, layers and experts go."""

from typing import Final

_DISPATCHER: Final = {
    "local": (
        "sharding.expert_parallel.local:LocalConfig",
        "All experts on every device; tokens stay where they are.",
    ),
    "all_gather": (
        "sharding.expert_parallel.all_gather:AllGatherConfig",
        "Tokens are gathered to the experts, sums are scattered back.",
    ),
    "all_to_all": (
        "sharding.expert_parallel.all_to_all:AllToAllConfig",
        "Rows travel to the device of their expert and back; none is dropped.",
    ),
    "all_to_all_dropping": (
        "sharding.expert_parallel.all_to_all_dropping:AllToAllDroppingConfig",
        "Rows travel to the device of their expert in bounded buffers; the rest is dropped.",
    ),
    "least_loaded": (
        "jaxmoe.contrib.token_routes.least_loaded:LeastLoadedConfig",
        "Rows travel to the device of their expert, or to one that borrows it; none is dropped.",
    ),
}

_SEQUENCE_PARALLEL: Final = {
    "none": (
        "sharding.sequence_parallel.none:NoSequenceParallelConfig",
        "Whole sequences on every device; mesh.seq must be 1.",
    ),
    "auto": (
        "sharding.sequence_parallel.auto:AutoSequenceParallelConfig",
        "The form that loads the links least: by heads, devices, lengths and links.",
    ),
    "all_gather": (
        "sharding.sequence_parallel.all_gather:AllGatherKVConfig",
        "Every device gathers all keys and values.",
    ),
    "ulysses": (
        "sharding.sequence_parallel.ulysses:UlyssesConfig",
        "Positions exchanged for heads; mesh.seq must divide the key heads of a device.",
    ),
    "usp": (
        "sharding.sequence_parallel.usp:UlyssesRingConfig",
        "Heads exchanged among few devices, keys sent round between such groups.",
    ),
    "ring": ("sharding.sequence_parallel.ring:RingConfig", "Keys and values travel."),
    "token_ring": (
        "sharding.sequence_parallel.token_ring:TokenRingConfig",
        "Queries travel one way, their results the other.",
    ),
    "levels": (
        "jaxmoe.contrib.levels.by_level:LevelsConfig",
        "Rings of as many devices as the documents of a micro-batch need.",
    ),
}

_PIPELINE: Final = {
    "interleaved": (
        "sharding.pipeline.interleaved:InterleavedConfig",
        "F of one micro-batch and B of another in one tick.",
    ),
    "gpipe": ("sharding.pipeline.gpipe:GPipeConfig", "All F, then all B."),
}

_PLACER: Final = {
    "exflow": (
        "jaxmoe.contrib.placement.exflow:ExFlowConfig",
        "Minimises crossings between adjacent layers.",
    ),
    "moetuner": (
        "jaxmoe.contrib.placement.moetuner:MoETunerConfig",
        "Equalises the loads of the devices first, then minimises the busiest pair of devices.",
    ),
    "expert_grouping": (
        "jaxmoe.contrib.placement.grouping:ExpertGroupingConfig",
        "Places experts that the same token ids choose on the same device.",
    ),
}

_OBSERVER: Final = {
    "brief": (
        "jaxmoe.layers.observer:BriefObserver",
        "Observes nothing beside the load of the routers.",
    ),
    "detailed": (
        "jaxmoe.contrib.telemetry.observer:DetailedObserver",
        "Observes sizes and outliers of branches, logits, correlations of experts and updates.",
    ),
}
_UPDATE: Final = {
    "whole": (
        "jaxmoe.training.parts.update:WholeUpdate",
        "The whole state at once, on the device.",
    ),
    "parts": (
        "jaxmoe.contrib.offload.optimizer_parts:UpdateInParts",
        "Part after part, of a state in host memory.",
    ),
    "files": (
        "jaxmoe.contrib.offload.files_step:UpdateFromFiles",
        "Part after part, of a state in files.",
    ),
}

_MATMUL: Final = {
    "full": ("jaxmoe.precision:FullPrecisionConfig", "Products in the compute dtype."),
    "halo": (
        "jaxmoe.contrib.few_bits.halo:HaloConfig",
        "Products in 8 bits, rotated first (HALO, arXiv 2501.02625).",
    ),
}

_TENSOR_PRODUCTS: Final = {
    "whole": (
        "sharding.products.collective:WholeProductsConfig",
        "One collective for all rows, before or after one product.",
    ),
    "ring": (
        "sharding.products.collective:RingProductsConfig",
        "Products of the rows of one device at a time, beside permutes to the next device.",
    ),
}

_CACHE_READING: Final = {
    "whole": (
        "sharding.sequence_parallel.reading.readings:WholeCacheConfig",
        "Attention of generated tokens to all earlier ones.",
    ),
    "pages": (
        "sharding.sequence_parallel.reading.page_selection:PageSelectionConfig",
        "Attention of generated tokens to some pages of the cache; it changes what is generated.",
    ),
}

_HOST_PARAMETERS: Final = {
    "window": (
        "jaxmoe.contrib.layerwise.offload:LayerWindowConfig",
        "A window of layers on the device, the others in host memory (TPI-LLM).",
    ),
    "slots": (
        "jaxmoe.contrib.serving_lab.expert_slots:ExpertSlotsConfig",
        "Slots on the device, each for one routed expert; all experts in host memory.",
    ),
}

_BACKWARD: Final = {
    "micro_batches": (
        "jaxmoe.training.gradients:MicroBatchBackward",
        "One micro-batch after the other.",
    ),
    "pipeline": (
        "jaxmoe.training.pipeline.gradients:PipelineBackward",
        "All micro-batches in a pipeline over `stage`, by its schedule.",
    ),
    "probed": (
        "jaxmoe.contrib.mkor.backward:ProbedBackward",
        "One micro-batch after the other, with probes of the dense matrices.",
    ),
    "repeated": (
        "jaxmoe.contrib.adapters.repeated:RepeatedBackward",
        "Several passes over each row, which an adapter compares.",
    ),
}

_WEIGHT_STORAGE: Final = {
    "rounded": (
        "jaxmoe.models.weight_storage:RoundedWeights",
        "Values and scales of matrices, with which the model computes.",
    ),
    "bitstack": (
        "jaxmoe.contrib.few_bits.bitstack:BitStackWeights",
        "Sums of blocks of signs, which are expanded when they have been read.",
    ),
}

_TOKEN_ROUTE: Final = {
    "tables": (
        "jaxmoe.contrib.token_routes.token_tables:TablesRoute",
        "Tokens first move to the device that probably holds their experts, by tables in a file.",
    ),
}

BASES: Final = {
    "backward": "jaxmoe.training.estimators.backward:Backward",
    "observer": "jaxmoe.layers.observer:Observer",
    "update": "jaxmoe.training.parts.update:Update",
    "dispatcher": "sharding.expert_parallel.dispatcher:Dispatcher",
    "token_route": "sharding.expert_parallel.routes:TokenRoute",
    "sequence_parallel": "sharding.sequence_parallel.form:SequenceParallelism",
    "matmul": "jaxmoe.precision:MatmulConfig",
    "weight_storage": "jaxmoe.models.weight_storage:WeightStorage",
    "tensor_products": "sharding.products.collective:TensorProductsConfig",
    "cache_reading": "sharding.sequence_parallel.reading.readings:CacheReading",
    "host_parameters": "jaxmoe.models.decode:HostParametersConfig",
    "pipeline": "sharding.pipeline.order:PipelineOrder",
    "placer": "jaxmoe.contrib.placement.solution:Placer",
}

MEMBERS: Final = {
    "backward": _BACKWARD,
    "observer": _OBSERVER,
    "update": _UPDATE,
    "dispatcher": _DISPATCHER,
    "token_route": _TOKEN_ROUTE,
    "sequence_parallel": _SEQUENCE_PARALLEL,
    "matmul": _MATMUL,
    "weight_storage": _WEIGHT_STORAGE,
    "tensor_products": _TENSOR_PRODUCTS,
    "cache_reading": _CACHE_READING,
    "host_parameters": _HOST_PARAMETERS,
    "pipeline": _PIPELINE,
    "placer": _PLACER,
}
