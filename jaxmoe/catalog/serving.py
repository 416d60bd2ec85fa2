# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Members of the choices of texts, of foreign weights, of a server and of its simulation."""

from typing import Final

_WRITER: Final = {
    "left_to_right": (
        "jaxmoe.generation.text:LeftToRightConfig",
        "One token after the other, with a cache.",
    ),
    "fill_in": (
        "jaxmoe.contrib.diffusion.writer:FillInConfig",
        "All tokens from masks, in any order.",
    ),
}
_BACKEND: Final = {
    "pages": (
        "jaxmoe.serve.device.backend:PagesConfig",
        "Keys and values in pages, one token after the other.",
    ),
    "rows": (
        "jaxmoe.contrib.diffusion.backend:RowsConfig",
        "Rows of a masked-diffusion model, filled in together.",
    ),
}
_TOOL_PARSER: Final = {
    "hermes": (
        "jaxmoe.serve.http.tools.hermes:HermesConfig",
        "JSON objects between <tool_call> and </tool_call>: Hermes, Qwen.",
    ),
    "mistral": (
        "jaxmoe.serve.http.tools.mistral:MistralConfig",
        "A list of JSON objects behind [TOOL_CALLS]: Mistral.",
    ),
    "llama3_json": (
        "jaxmoe.serve.http.tools.llama3_json:Llama3JsonConfig",
        "JSON objects at the begin of an answer, or behind <|python_tag|>: Llama 3.",
    ),
    "deepseek_v3": (
        "jaxmoe.serve.http.tools.deepseek:DeepSeekV3Config",
        "Names and blocks of JSON between marks: DeepSeek V3, R1.",
    ),
    "deepseek_v31": (
        "jaxmoe.serve.http.tools.deepseek:DeepSeekV31Config",
        "Names and JSON between marks: DeepSeek V3.1.",
    ),
}
_REASONING_PARSER: Final = {
    "none": ("jaxmoe.serve.http.reasoning:NoReasoningConfig", "None: the whole answer is content."),
    "think_tags": (
        "jaxmoe.serve.http.reasoning:ThinkTagsConfig",
        "Between <think> and </think>, as DeepSeek-R1 and Qwen3 write it.",
    ),
}
_SERVER: Final = {
    "fleet": (
        "jaxmoe.contrib.fleet.serving:FleetSizesConfig",
        "One or several instances of the model, whose meshes may change.",
    ),
    "one": ("jaxmoe.run.serving:OneEngineConfig", "One instance of the model."),
}
_BATCHING: Final = {
    "split_fuse": (
        "jaxmoe.serve.policies.batching.split_fuse:SplitFuseConfig",
        "Decoding first, the rest of a token budget for pieces of prompts.",
    ),
    "prefill_first": (
        "jaxmoe.serve.policies.batching.prefill_first:PrefillFirstConfig",
        "Whole prompts before any decoding.",
    ),
    "laps": (
        "jaxmoe.serve.policies.batching.laps:LapsConfig",
        "Two queues by the length of the prompt.",
    ),
    "batch_llm": (
        "jaxmoe.serve.policies.batching.batch_llm:BatchLLMConfig",
        "Groups by shared beginning, the largest share of decoding first.",
    ),
}
_SIMULATED_BATCHING: Final = {
    "layered": (
        "jaxmoe.contrib.serving_lab.batching.layered:LayeredConfig",
        "A group of layers of a whole prompt per step, with all layers of decoding.",
    ),
    "flow_prefill": (
        "jaxmoe.contrib.serving_lab.batching.flow_prefill:FlowPrefillConfig",
        "Least slack first; prompts stop between layers.",
    ),
    "nexus": (
        "jaxmoe.contrib.serving_lab.batching.nexus:NexusConfig",
        "Two lanes; the share by predicted latency.",
    ),
    "semi_pd": (
        "jaxmoe.contrib.serving_lab.batching.semi_pd:SemiPDConfig",
        "Two lanes; the share follows the missed limits.",
    ),
    "nano_batches": (
        "jaxmoe.contrib.serving_lab.batching.nano_batches:NanoBatchesConfig",
        "Decoding and pieces of prompts in overlapping parts.",
    ),
}
_DISPATCH: Final = {
    "round_robin": (
        "jaxmoe.contrib.fleet.dispatch.round_robin:RoundRobinConfig",
        "One instance after the other.",
    ),
    "least_loaded": (
        "jaxmoe.contrib.fleet.dispatch.least_loaded:LeastLoadedDispatchConfig",
        "Instance with the fewest tokens left to compute.",
    ),
    "prefix_aware": (
        "jaxmoe.contrib.fleet.dispatch.prefix_aware:PrefixAwareConfig",
        "Longest cached beginning, unless the load is uneven.",
    ),
    "dual_map": (
        "jaxmoe.contrib.fleet.dispatch.dual_map:DualMapConfig",
        "Two instances for each beginning of a prompt.",
    ),
    "llumnix": (
        "jaxmoe.contrib.fleet.dispatch.llumnix:LlumnixConfig",
        "Freest instance; running requests move there.",
    ),
    "dist_serve": (
        "jaxmoe.contrib.fleet.dispatch.dist_serve:DistServeConfig",
        "Instances for prompts, and others for answers.",
    ),
    "pd_serve": (
        "jaxmoe.contrib.fleet.dispatch.pd_serve:PDServeConfig",
        "Instances for prompts that take a request when idle, and others for answers.",
    ),
    "prfaas": (
        "jaxmoe.contrib.fleet.dispatch.prfaas:PrfaasConfig",
        "Remote instances for prompts, when that is faster.",
    ),
    "saga": (
        "jaxmoe.contrib.fleet.dispatch.saga:SagaConfig",
        "One instance for all calls of a workflow.",
    ),
}
_RETENTION: Final = {
    "lru": (
        "jaxmoe.serve.policies.retention.lru:LRURetentionConfig",
        "Any pages; a preempted sequence is computed again.",
    ),
    "swap_groups": (
        "jaxmoe.serve.policies.retention.swap_groups:SwapGroupsConfig",
        "Pages in groups; a preempted sequence goes to host memory.",
    ),
}
_SCALING: Final = {
    "fixed": ("jaxmoe.contrib.fleet.scaling.fixed:FixedScalingConfig", "All instances, always."),
    "slo": (
        "jaxmoe.contrib.fleet.scaling.slo:SLOConfig",
        "Instances that the predicted rate needs.",
    ),
    "elastic_experts": (
        "jaxmoe.contrib.fleet.scaling.elastic_experts:ElasticExpertsConfig",
        "Twice or half the devices of an instance.",
    ),
    "polca": ("jaxmoe.contrib.fleet.scaling.polca:PolcaConfig", "Clocks by a power budget."),
}
_WORKLOAD: Final = {
    "gamma": (
        "jaxmoe.contrib.serving_lab.simulation.workload:GammaConfig",
        "Independent requests in bursts.",
    ),
    "sessions": (
        "jaxmoe.contrib.serving_lab.simulation.workload:SessionsConfig",
        "Conversations: each turn repeats what was said and adds to it.",
    ),
    "file": (
        "jaxmoe.contrib.serving_lab.simulation.workload:TraceFileConfig",
        "Requests of a trace file, faster or slower by `rate`.",
    ),
}
_ITEM_CACHE: Final = {
    "lru": ("jaxmoe.contrib.serving_lab.caches.lru:LRUConfig", "Least recently used."),
    "lfu": ("jaxmoe.contrib.serving_lab.caches.lfu:LFUConfig", "Least frequently used."),
    "belady": (
        "jaxmoe.contrib.serving_lab.caches.belady:BeladyConfig",
        "Farthest next use; knows the future.",
    ),
    "scores": (
        "jaxmoe.contrib.serving_lab.caches.scores:ScoresConfig",
        "Lowest running score of the router.",
    ),
    "predicted": (
        "jaxmoe.contrib.serving_lab.caches.predicted:PredictedConfig",
        "Items that a predictor expects; of the others the least recently used goes first.",
    ),
    "window": (
        "jaxmoe.contrib.serving_lab.caches.window:WindowConfig",
        "The next items of a cycle.",
    ),
    "category": (
        "jaxmoe.contrib.serving_lab.caches.category:CategoryConfig",
        "Lifetime and quota by category.",
    ),
}

_GROUPED = "jaxmoe.checkpoint.huggingface.families.grouped"
_SIGMOID = "jaxmoe.checkpoint.huggingface.families.sigmoid"
_LATENT = "jaxmoe.checkpoint.huggingface.families.latent"
_HYBRID = "jaxmoe.checkpoint.huggingface.families.hybrid"
_LINEAR: Final = "jaxmoe.contrib.linear_attention.families"
_LAYERS: Final = "jaxmoe.contrib.family_layers.families"

_FAMILY: Final = {
    "olmoe": (f"{_GROUPED}.olmoe:OlmoeFamily", "OLMoE."),
    "mixtral": (f"{_GROUPED}.mixtral:MixtralFamily", "Mixtral."),
    "qwen3_moe": (f"{_GROUPED}.qwen3_moe:Qwen3MoeFamily", "Qwen3-MoE."),
    "deepseek_v3": (f"{_LATENT}.deepseek_v3:DeepseekV3Family", "DeepSeek-V3."),
    "jamba": (f"{_HYBRID}.jamba:JambaFamily", "Jamba."),
    "granitemoehybrid": (f"{_HYBRID}.granitemoehybrid:GraniteMoeHybridFamily", "Granite 4.0."),
    "dots1": (f"{_SIGMOID}.dots1:Dots1Family", "dots.llm1."),
    "granitemoe": (f"{_GROUPED}.granitemoe:GraniteMoeFamily", "Granite 3 with experts."),
    "deepseek_v2": (f"{_LATENT}.deepseek_v2:DeepseekV2Family", "DeepSeek-V2."),
    "glm4_moe_lite": (f"{_LATENT}.glm4_moe_lite:Glm4MoeLiteFamily", "GLM-4.7-Flash."),
    "granitemoeshared": (
        f"{_GROUPED}.granitemoeshared:GraniteMoeSharedFamily",
        "Granite 3 with experts and a shared one.",
    ),
    "hunyuan_v1_moe": (f"{_GROUPED}.hunyuan_v1_moe:HunyuanMoeFamily", "Hunyuan-A13B."),
    "exaone_moe": (f"{_SIGMOID}.exaone_moe:ExaoneMoeFamily", "K-EXAONE."),
    "dbrx": (f"{_GROUPED}.dbrx:DbrxFamily", "DBRX."),
    "lfm2_moe": (f"{_LINEAR}.lfm2_moe:Lfm2MoeFamily", "LFM2 with experts."),
    "qwen3_next": (f"{_LINEAR}.qwen3_next:Qwen3NextFamily", "Qwen3-Next."),
    "kimi_linear": (f"{_LINEAR}.kimi_linear:KimiLinearFamily", "Kimi Linear."),
    "minimax": (f"{_LINEAR}.minimax:MiniMaxFamily", "MiniMax-01."),
    "qwen3_5_moe_text": (
        f"{_LINEAR}.qwen3_5_moe:Qwen35MoeFamily",
        "Qwen3.5-MoE, its model of text.",
    ),
    "flex_olmo": (f"{_GROUPED}.flex_olmo:FlexOlmoFamily", "FlexOlmo."),
    "afmoe": (f"{_SIGMOID}.afmoe:AfmoeFamily", "AFMoE (Trinity)."),
    "phimoe": (f"{_GROUPED}.phimoe:PhimoeFamily", "Phi-3.5-MoE."),
    "cohere2_moe": (f"{_SIGMOID}.cohere2_moe:Cohere2MoeFamily", "Cohere 2 with experts."),
    "qwen2_moe": (f"{_GROUPED}.qwen2_moe:Qwen2MoeFamily", "Qwen2-MoE."),
    "gpt_oss": (f"{_GROUPED}.gpt_oss:GptOssFamily", "gpt-oss."),
    "solar_open": (f"{_SIGMOID}.solar_open:SolarOpenFamily", "Solar Open."),
    "glm4_moe": (f"{_SIGMOID}.glm4_moe:Glm4MoeFamily", "GLM-4.5."),
    "ernie4_5_moe": (f"{_GROUPED}.ernie4_5_moe:Ernie45MoeFamily", "ERNIE 4.5."),
    "minimax_m2": (f"{_SIGMOID}.minimax_m2:MiniMaxM2Family", "MiniMax-M2."),
    "nemotron_h": (f"{_HYBRID}.nemotron_h:NemotronHFamily", "Nemotron-H and Nemotron 3."),
    "llama4_text": (f"{_SIGMOID}.llama4_text:Llama4TextFamily", "Llama 4, its text model."),
    "mimo_v2_flash": (f"{_LAYERS}.mimo_v2_flash:MimoV2FlashFamily", "MiMo-V2-Flash."),
    "jetmoe": (f"{_LAYERS}.jetmoe:JetMoeFamily", "JetMoE."),
    "deepseek_v32": (f"{_LAYERS}.deepseek_v32:DeepseekV32Family", "DeepSeek-V3.2."),
    "longcat_flash": (f"{_LAYERS}.longcat_flash:LongcatFlashFamily", "LongCat-Flash."),
    "bailing_moe": (f"{_SIGMOID}.bailing_moe:BailingMoeFamily", "Ling 2.0."),
    "bailing_moe_v2_5": (f"{_LINEAR}.bailing_moe_v2_5:BailingMoeV25Family", "Ling 2.5."),
    "bailing_hybrid": (f"{_LINEAR}.bailing_hybrid:BailingHybridFamily", "Ling 3.0."),
}

BASES: Final = {
    "family": "jaxmoe.checkpoint.huggingface.family:Family",
    "writer": "jaxmoe.generation.text:WriterConfig",
    "backend": "jaxmoe.serve.backend:BackendConfig",
    "tool_parser": "jaxmoe.serve.http.tools.base:ToolParserConfig",
    "reasoning_parser": "jaxmoe.serve.http.reasoning:ReasoningParserConfig",
    "server": "jaxmoe.run.serving:ServerConfig",
    "batching": "jaxmoe.serve.policies.batching.base:BatchingConfig",
    "simulated_batching": ("jaxmoe.contrib.serving_lab.batching.base:SimulatedBatchingConfig"),
    "dispatch": "jaxmoe.contrib.fleet.dispatch.base:DispatchConfig",
    "retention": "jaxmoe.serve.policies.retention.base:RetentionConfig",
    "scaling": "jaxmoe.contrib.fleet.scaling.base:ScalingConfig",
    "workload": "jaxmoe.contrib.serving_lab.simulation.workload:Workload",
    "item_cache": "jaxmoe.contrib.serving_lab.caches.base:ItemCacheConfig",
}

MEMBERS: Final = {
    "family": _FAMILY,
    "writer": _WRITER,
    "backend": _BACKEND,
    "tool_parser": _TOOL_PARSER,
    "reasoning_parser": _REASONING_PARSER,
    "server": _SERVER,
    "batching": _BATCHING,
    "simulated_batching": _SIMULATED_BATCHING,
    "dispatch": _DISPATCH,
    "retention": _RETENTION,
    "scaling": _SCALING,
    "workload": _WORKLOAD,
    "item_cache": _ITEM_CACHE,
}
