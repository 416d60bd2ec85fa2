# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Members of the choices of a model: routing, layers, adapters, precision."""

from typing import Final

_ROUTER: Final = {
    "softmax_topk": (
        "jaxmoe.routing.routers.token_choice.topk:SoftmaxTopKConfig",
        "The K experts of highest softmax probability.",
    ),
    "sigmoid_topk": (
        "jaxmoe.routing.routers.token_choice.topk:SigmoidTopKConfig",
        "The K experts of highest sigmoid score.",
    ),
    "sqrt_softplus_topk": (
        "jaxmoe.routing.routers.token_choice.topk:SqrtSoftplusTopKConfig",
        "The K experts of highest sqrt(softplus) score.",
    ),
    "noisy_topk": (
        "jaxmoe.routing.routers.token_choice.noisy_topk:NoisyTopKConfig",
        "The K experts of highest logit after learned noise.",
    ),
    "gshard": (
        "jaxmoe.routing.routers.token_choice.gshard:GShardConfig",
        "The two experts of highest logit, the second dropped at random.",
    ),
    "sparse_mixer": (
        "jaxmoe.routing.routers.token_choice.sparse_mixer:SparseMixerConfig",
        "The K experts of highest logit, each weighed by a softmax over those within a margin.",
    ),
    "cosine_topk": (
        "jaxmoe.routing.routers.token_choice.cosine_topk:CosineTopKConfig",
        "The K experts of largest cosine with a projection of the token.",
    ),
    "base_layer": (
        "jaxmoe.routing.routers.assignment.base_layer:BaseLayerConfig",
        "Sigmoid scores; in training a greedy assignment in which no expert exceeds its share.",
    ),
    "sinkhorn": (
        "jaxmoe.routing.routers.assignment.sinkhorn:SinkhornConfig",
        "The K experts of largest share in an even transport plan.",
    ),
    "selective_sinkhorn": (
        "jaxmoe.routing.routers.assignment.selective_sinkhorn:SelectiveSinkhornConfig",
        "Softmax top-k, replaced in a share of the training steps by an even transport plan.",
    ),
    "hash": (
        "jaxmoe.routing.routers.unlearned.hash_routing:HashConfig",
        "K experts fixed for each token id.",
    ),
    "uniform_random": (
        "jaxmoe.routing.routers.unlearned.uniform_random:UniformRandomConfig",
        "K random experts for each token.",
    ),
    "forced_balance": (
        "jaxmoe.routing.routers.unlearned.forced_balance:ForcedBalanceConfig",
        "K experts in turn: an exactly even load, for benchmarks.",
    ),
    "progressive_topk": (
        "jaxmoe.routing.routers.token_choice.progressive_topk:ProgressiveTopKConfig",
        "Softmax top-k whose K is larger in the lowest layers until a given step.",
    ),
    "moe_plus_plus": (
        "jaxmoe.routing.routers.token_choice.moe_plus_plus:MoEPlusPlusConfig",
        "Softmax top-k whose logits add those of the previous MoE layer, transformed.",
    ),
    "kmeans": (
        "jaxmoe.routing.routers.token_choice.kmeans:KMeansConfig",
        "The K experts whose centroids of past tokens are nearest in direction.",
    ),
    "expert_choice": (
        "jaxmoe.routing.routers.expert_choice.expert_choice:ExpertChoiceConfig",
        "Each expert takes its best tokens: even loads, not causal.",
    ),
    "soft_moe": (
        "jaxmoe.routing.routers.expert_choice.soft_moe:SoftMoEConfig",
        "Experts read mixtures of all tokens of a row: no choice, not causal.",
    ),
}
_GATE: Final = {
    "softmax": ("jaxmoe.routing.gates:SoftmaxGateConfig", "The router's own score."),
    "renormalized": (
        "jaxmoe.routing.gates:RenormalizedGateConfig",
        "Scores divided by their sum over the chosen experts of the token.",
    ),
    "sqrt": (
        "jaxmoe.routing.gates:SqrtGateConfig",
        "Square root of the renormalized score: keeps the RMS of the output for every K.",
    ),
}
_BALANCER: Final = {
    "load_balance": (
        "jaxmoe.routing.balancers.load_balance:LoadBalanceConfig",
        "Load-balancing loss, over the global batch by default.",
    ),
    "router_z": (
        "jaxmoe.routing.balancers.router_z:RouterZConfig",
        "Router z-loss: penalises large logits.",
    ),
    "importance_variation": (
        "jaxmoe.routing.balancers.load_variation:ImportanceVariationConfig",
        "Squared coefficient of variation of the experts' summed gates.",
    ),
    "load_variation": (
        "jaxmoe.routing.balancers.load_variation:LoadVariationConfig",
        "Squared coefficient of variation of the smooth loads of `noisy_topk`.",
    ),
    "heterogeneous": (
        "jaxmoe.routing.balancers.heterogeneous:HeterogeneousBalanceConfig",
        "Even load among experts that compute, and 1 / computing_share of it for others.",
    ),
    "top_one_balance": (
        "jaxmoe.routing.balancers.top_one:TopOneBalanceConfig",
        "Even load and confident choices, for one expert per token.",
    ),
    "coupling": (
        "jaxmoe.routing.balancers.coupling:CouplingConfig",
        "Expert-router coupling loss of the weights; for routers with one matrix `weight`.",
    ),
}
_BIAS: Final = {
    "loss_free": (
        "jaxmoe.routing.biases.loss_free:LossFreeConfig",
        "A bias per expert that rises while the expert has too few tokens, and falls otherwise.",
    ),
    "bip": (
        "jaxmoe.routing.biases.bip:BipConfig",
        "Expert prices by alternating exact minimisation of the dual of the balanced assignment.",
    ),
    "quantile": (
        "jaxmoe.routing.biases.quantile:QuantileConfig",
        "The bias that would have given each expert its even share of the step's tokens.",
    ),
}
_CAPACITY: Final = {
    "capacity": (
        "jaxmoe.routing.capacity:CapacityConfig",
        "Limits the assignments of an expert within one sequence.",
    ),
    "token_rounding": (
        "jaxmoe.routing.token_rounding:TokenRoundingConfig",
        "In training, rounds the load of each expert to a multiple of a kernel's tile.",
    ),
}
_ADAPTER: Final = {
    "lora": (
        "jaxmoe.adapters.lora:LoraConfig",
        "A low-rank addition to each target; all else is frozen.",
    ),
    "select": (
        "jaxmoe.adapters.select:SelectConfig",
        "Train some of the model's own parameters.",
    ),
    "adalora": (
        "jaxmoe.contrib.adapters.adalora:AdaLoraConfig",
        "Low-rank additions whose ranks shrink where they matter least.",
    ),
    "switch_lora": (
        "jaxmoe.contrib.adapters.switch_lora:SwitchLoraConfig",
        "Low-rank additions whose vectors are swapped all the time; the adapted matrices move.",
    ),
    "mixture_of_shards": (
        "jaxmoe.contrib.adapters.mixture_of_shards:MixtureOfShardsConfig",
        "Low-rank additions from pools of shards that all layers share.",
    ),
    "lift": (
        "jaxmoe.contrib.adapters.lift:LiftConfig",
        "Train the largest entries of each target's low-rank approximation; all else is frozen.",
    ),
    "quantised_choices": (
        "jaxmoe.contrib.adapters.quantised_choices:QuantisedChoicesConfig",
        "Weights in 2, 3 or 4 bits by layer, drawn in each step.",
    ),
    "task_lora": (
        "jaxmoe.contrib.adapters.task_lora:TaskLoraConfig",
        "One LoRA for each part of data:mixture; all else is frozen.",
    ),
    "lora_mixer": (
        "jaxmoe.contrib.adapters.lora_mixer:LoraMixerConfig",
        "Low-rank additions mixed by a router of the token (LoRA-Mixer); all else is frozen.",
    ),
    "multi_head_routing": (
        "jaxmoe.contrib.adapters.multi_head_routing:MultiHeadRoutingConfig",
        "Low-rank additions averaged for each task (Poly, multi-head routing); all else is frozen.",
    ),
    "remix": (
        "jaxmoe.contrib.adapters.remix:RemixConfig",
        "Low-rank additions chosen by a router of the token (ReMix); all else is frozen.",
    ),
    "shared_store": (
        "jaxmoe.contrib.adapters.shared_store:SharedStoreConfig",
        "Matrices made of fewer trained cells, from the first step on (STABLE-RPS).",
    ),
}

_MIXER: Final = {
    "grouped_query": (
        "jaxmoe.layers.mixers.attention:AttentionConfig",
        "Grouped-query attention with rotary positions.",
    ),
    "latent": (
        "jaxmoe.layers.mixers.latent_attention:LatentAttentionConfig",
        "Multi-head latent attention: keys and values are made from one short vector per token.",
    ),
    "mamba": (
        "jaxmoe.layers.mixers.mamba:MambaConfig",
        "Mamba: a selective state per channel in place of attention.",
    ),
    "mamba2": (
        "jaxmoe.layers.mixers.mamba2:Mamba2Config",
        "Mamba-2: a decaying state per head in place of attention.",
    ),
    "shared_keys": (
        "jaxmoe.contrib.depth.shared_keys:SharedKeysConfig",
        "Grouped-query attention that takes keys and values of earlier layers.",
    ),
    "parallel_streams": (
        "jaxmoe.contrib.depth.parallel_streams:ParallelStreamsConfig",
        "Grouped-query attention of several streams of each sequence (ParScale).",
    ),
    "short_convolution": (
        "jaxmoe.contrib.linear_attention.short_convolution:ShortConvolutionConfig",
        "A gated convolution over a few positions in place of attention (LFM2).",
    ),
    "gated_delta": (
        "jaxmoe.contrib.linear_attention.gated_delta:GatedDeltaConfig",
        "Gated DeltaNet: a state that decays and is corrected, in place of attention.",
    ),
    "kimi_delta": (
        "jaxmoe.contrib.linear_attention.kimi_delta:KimiDeltaConfig",
        "Kimi Delta Attention: Gated DeltaNet with a decay for each row of the state.",
    ),
    "lightning": (
        "jaxmoe.contrib.linear_attention.lightning:LightningConfig",
        "Lightning attention: linear attention with a fixed decay per head.",
    ),
    "rotary_lightning": (
        "jaxmoe.contrib.linear_attention.rotary_lightning:RotaryLightningConfig",
        "Lightning attention with QK-norm, RoPE and a norm of groups of heads.",
    ),
    "narrow_values": (
        "jaxmoe.contrib.family_layers.narrow_values:NarrowValuesConfig",
        "Grouped-query attention whose values are narrower than its keys.",
    ),
    "sparse_latent": (
        "jaxmoe.contrib.family_layers.sparse_latent:SparseLatentConfig",
        "Latent attention to the keys that a lightning indexer chooses.",
    ),
    "scaled_latent": (
        "jaxmoe.contrib.family_layers.scaled_latent:ScaledLatentConfig",
        "Latent attention whose queries and latents are scaled by their widths.",
    ),
    "expert_heads": (
        "jaxmoe.contrib.family_layers.expert_heads:ExpertHeadsConfig",
        "Attention whose queries and outputs are made by experts that a router chooses.",
    ),
    "gated_latent": (
        "jaxmoe.contrib.linear_attention.gated_latent:GatedLatentConfig",
        "Latent attention whose heads are gated by the layer's input.",
    ),
}

_FEED_FORWARD: Final = {
    "dense": ("jaxmoe.layers.feed_forwards.dense:DenseConfig", "A dense feed-forward."),
    "moe": (
        "jaxmoe.layers.feed_forwards.moe.config:MoEConfig",
        "A Mixture-of-Experts feed-forward layer: router, gate, balancers, capacity, experts.",
    ),
    "biased_moe": (
        "jaxmoe.contrib.family_layers.output_bias:BiasedMoEConfig",
        "A Mixture-of-Experts feed-forward layer whose output has a bias.",
    ),
    "none": (
        "jaxmoe.layers.single_half:NoFeedForwardConfig",
        "No feed-forward: the layer is its mixer, without parameters of a second half.",
    ),
    "shortcut_dense": (
        "jaxmoe.contrib.family_layers.shortcut:ShortcutDenseConfig",
        "A dense feed-forward that hands its input on to the experts of a later layer.",
    ),
    "ultra_mem": (
        "jaxmoe.contrib.depth.ultra_mem:UltraMemConfig",
        "A dense SwiGLU and a memory of looked-up values (UltraMemV2).",
    ),
    "two_sizes": (
        "jaxmoe.contrib.depth.two_sizes:TwoSizesConfig",
        "A big and a small dense SwiGLU, of which each token takes one (Duo-LLM).",
    ),
}

_ACTIVATION: Final = {
    "swiglu": (
        "jaxmoe.layers.feed_forwards.activations:SwiGLUConfig",
        "The up projection times silu of the gate.",
    ),
    "clamped_swiglu": (
        "jaxmoe.layers.feed_forwards.activations:ClampedSwiGLUConfig",
        "SwiGLU whose projections are clamped, with a steeper sigmoid and a shifted up projection.",
    ),
    "geglu": (
        "jaxmoe.layers.feed_forwards.activations:GeGLUConfig",
        "The up projection times the Gaussian error linear unit of the gate.",
    ),
    "relu_squared": (
        "jaxmoe.layers.feed_forwards.activations:ReLUSquaredConfig",
        "The square of the positive part of the only projection: no gate.",
    ),
}

_RESIDUAL: Final = {
    "standard": (
        "jaxmoe.layers.residual:StandardResidualConfig",
        "Each half adds its output to the stream at once.",
    ),
    "ladder": (
        "jaxmoe.layers.residual:LadderResidualConfig",
        "Each half adds its output to the stream one layer later, beside which it is summed.",
    ),
    "parallel": (
        "jaxmoe.layers.residual:ParallelResidualConfig",
        "Both halves read the stream before the layer, and add their outputs to it together.",
    ),
    "weighted": (
        "jaxmoe.layers.residual:WeightedResidualConfig",
        "Each half adds its output to the stream, each with a constant factor.",
    ),
    "hyper": (
        "jaxmoe.contrib.depth.hyper_connections:HyperResidualConfig",
        "Each half reads from and writes to n streams with learned weights (hyper-connections).",
    ),
}

_ROPE_SCALING: Final = {
    "linear": (
        "jaxmoe.layers.rotary:LinearScalingConfig",
        "Linear interpolation: all frequencies are divided by one factor.",
    ),
    "dynamic": (
        "jaxmoe.layers.rotary:DynamicScalingConfig",
        "NTK-aware scaling: the base of the wavelengths grows with the length of the row.",
    ),
    "yarn": (
        "jaxmoe.layers.rotary:YarnConfig",
        "YaRN: slow features are interpolated, fast ones stay, and logits are sharpened.",
    ),
    "llama3": (
        "jaxmoe.layers.rotary:Llama3ScalingConfig",
        "Llama 3.1: long wavelengths are stretched, short ones stay.",
    ),
    "longrope": (
        "jaxmoe.layers.rotary:LongRopeConfig",
        "LongRoPE: a searched divisor for each feature, one set for short rows and one for long.",
    ),
}

_NORM: Final = {
    "rms": (
        "jaxmoe.layers.norms:RmsNormConfig",
        "Divides features by their root mean square (RMSNorm).",
    ),
    "centred_rms": (
        "jaxmoe.layers.norms:CentredRmsNormConfig",
        "RMSNorm whose factors are 1 + gain, so that weight decay draws them to 1.",
    ),
    "rms_of_layers": (
        "jaxmoe.contrib.family_layers.output_bias:LayerRmsNormConfig",
        "RMSNorm with an epsilon of its own in the halves of layers.",
    ),
    "layer": (
        "jaxmoe.layers.norms:LayerNormConfig",
        "Subtracts the mean of the features and divides by their deviation (LayerNorm).",
    ),
}

_LOOP: Final = {
    "loop": (
        "jaxmoe.contrib.depth.loop:LoopConfig",
        "Consecutive layers that are called several times.",
    ),
}

_ROWS: Final = {
    "halves": (
        "jaxmoe.contrib.depth.halves:HalvesConfig",
        "Two halves of a device's rows that pass through a layer alternately (TokenWeave).",
    ),
}
_PREDICTOR: Final = {
    "multi_token_prediction": (
        "jaxmoe.contrib.multi_token_prediction.config:MultiTokenModulesConfig",
        "Modules with a layer each that predict tokens further ahead (DeepSeek-V3).",
    ),
}

BASES: Final = {
    "router": "jaxmoe.routing.base:RouterBase",
    "gate": "jaxmoe.routing.gates:GateBase",
    "balancer": "jaxmoe.routing.balancers.base:Balancer",
    "bias": "jaxmoe.routing.biases.base:SelectionBias",
    "capacity": "jaxmoe.routing.capacity:CapacityBase",
    "adapter": "jaxmoe.adapters.base:Adapter",
    "mixer": "jaxmoe.layers.context:MixerBase",
    "feed_forward": "jaxmoe.layers.context:FeedForwardBase",
    "activation": "jaxmoe.layers.feed_forwards.activations:ActivationBase",
    "residual": "jaxmoe.layers.residual:Residual",
    "rope_scaling": "jaxmoe.layers.rotary:RopeScaling",
    "norm": "jaxmoe.layers.norms:NormBase",
    "loop": "jaxmoe.models.loop:LayerLoop",
    "predictor": "jaxmoe.models.predictor:Predictor",
    "rows": "jaxmoe.layers.rows:ExecutionRows",
}

MEMBERS: Final = {
    "router": _ROUTER,
    "gate": _GATE,
    "balancer": _BALANCER,
    "bias": _BIAS,
    "capacity": _CAPACITY,
    "adapter": _ADAPTER,
    "mixer": _MIXER,
    "feed_forward": _FEED_FORWARD,
    "activation": _ACTIVATION,
    "residual": _RESIDUAL,
    "rope_scaling": _ROPE_SCALING,
    "norm": _NORM,
    "loop": _LOOP,
    "predictor": _PREDICTOR,
    "rows": _ROWS,
}
