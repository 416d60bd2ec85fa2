# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Whole MoE layers against those of `transformers`, with their random weights, in float32.

Needs the extra `hf` (PyTorch for the CPU and transformers 5.23).

To add a family: a row in FAMILIES.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards import ClampedSwiGLUConfig, MoEConfig, ReLUSquaredConfig
from jaxmoe.layers.feed_forwards.moe.layer import MoELayer
from jaxmoe.layers.records import RoutingInputs
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import (
    LossFreeConfig,
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
    SparseMixerConfig,
    SqrtSoftplusTopKConfig,
    ZeroComputationConfig,
)
from jaxmoe.routing.routers.token_choice.groups import GroupLimitConfig
from jaxmoe.routing.routers.token_choice.topk import LogitBiasConfig
from tests.support.model_options import moe_fields
from tests.support.tolerances import assert_close

pytestmark = [
    pytest.mark.slow,
    # Of PyTorch and transformers, about themselves.
    pytest.mark.filterwarnings("default"),
]

WIDTH, HIDDEN, SHARED, EXPERTS, TOP_K, FREE = 16, 12, 20, 8, 3, 4
ROWS, LENGTH = 2, 40
GROUPS = GroupLimitConfig(num_groups=4, top_groups=2, best_per_group=2)
SOFTMAX_BIASED = SoftmaxTopKConfig(bias=LossFreeConfig())
SIGMOID_BIASED = SigmoidTopKConfig(bias=LossFreeConfig())
SIGMOID_GROUPED = SigmoidTopKConfig(bias=LossFreeConfig(), groups=GROUPS)
OVER_CHOSEN = SoftmaxTopKConfig(softmax="after")
Values = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A module of transformers and the layer that computes the same."""

    package: str
    modules: tuple[str, ...]
    """Classes whose outputs are summed."""
    fields: Mapping[str, Any]
    moe: Mapping[str, Any]
    router: str = "gate.weight"
    biases: str | None = None
    """Name of the score correction bias."""
    experts: Callable[[Values], dict[str, np.ndarray]] | None = None
    shared: str | None = None
    logit_bias: str | None = None


def turned_experts(values: Values) -> dict[str, np.ndarray]:
    """gate_up_proj [E 2F D] and down_proj [E D F]."""
    gate_up = values["experts.gate_up_proj"].reshape(-1, 2, HIDDEN, WIDTH)
    down = values["experts.down_proj"]
    return {"gate_up": gate_up.transpose(0, 3, 1, 2), "down": down.transpose(0, 2, 1)}


def interleaved_experts(values: Values) -> dict[str, np.ndarray]:
    """gpt-oss: [E D 2F] with gate and up in turn, and biases."""
    gate_up = values["experts.gate_up_proj"].reshape(EXPERTS, WIDTH, HIDDEN, 2)
    bias = values["experts.gate_up_proj_bias"].reshape(EXPERTS, HIDDEN, 2)
    return {
        "gate_up": gate_up.transpose(0, 1, 3, 2),
        "down": values["experts.down_proj"],
        "gate_up_bias": bias.transpose(0, 2, 1),
        "down_bias": values["experts.down_proj_bias"],
    }


def straight_experts(values: Values) -> dict[str, np.ndarray]:
    """Llama 4: [E D 2F] and [E F D]."""
    gate_up = values["experts.gate_up_proj"].reshape(EXPERTS, WIDTH, 2, HIDDEN)
    return {"gate_up": gate_up, "down": values["experts.down_proj"]}


def ungated_experts(values: Values) -> dict[str, np.ndarray]:
    """Nemotron-H: up_proj [E F D]."""
    up = values["experts.up_proj"].transpose(0, 2, 1)
    return {"gate_up": up[:, :, None], "down": values["experts.down_proj"].transpose(0, 2, 1)}


def flat_experts(values: Values) -> dict[str, np.ndarray]:
    """DBRX: three matrices [E F, D]."""
    w1, v1, w2 = (
        values[f"experts.mlp.{name}"].reshape(EXPERTS, HIDDEN, WIDTH) for name in ("w1", "v1", "w2")
    )
    return {"gate_up": np.stack([w1, v1], axis=1).transpose(0, 3, 1, 2), "down": w2}


def shorter_experts(values: Values) -> dict[str, np.ndarray]:
    """LongCat: the matrices of experts without computation are there and are not read."""
    experts = turned_experts(values)
    return {"gate_up": experts["gate_up"][:EXPERTS], "down": experts["down"]}


def dense(values: Values, name: str) -> dict[str, np.ndarray]:
    """A dense branch under any of the names that the families use."""
    if f"{name}.input_linear.weight" in values:
        joined = values[f"{name}.input_linear.weight"]
        gate_up = joined.reshape(2, -1, WIDTH)
        down = values[f"{name}.output_linear.weight"]
    else:
        parts = ("gate_proj", "up_proj") if f"{name}.gate_proj.weight" in values else ("up_proj",)
        gate_up = np.stack([values[f"{name}.{part}.weight"] for part in parts])
        down = values[f"{name}.down_proj.weight"]
    return {"gate_up": gate_up.transpose(2, 0, 1), "down": down.T}


SIZES = {"hidden_size": WIDTH, "num_experts_per_tok": TOP_K, "moe_intermediate_size": HIDDEN}
GROUPED_FIELDS = {
    **SIZES,
    "n_routed_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
GROUPED_MOE = {
    "router": SIGMOID_GROUPED,
    "gate": RenormalizedGateConfig(scale=2.5),
    "num_shared_experts": 2,
}
CORRECTION = "gate.e_score_correction_bias"


def grouped(package: str, module: str, **changes: Any) -> Family:
    """A family that routes as DeepSeek-V3 does."""
    return Family(
        package=package,
        modules=(module,),
        fields=GROUPED_FIELDS,
        **{"moe": GROUPED_MOE, "biases": CORRECTION, "shared": "shared_experts"} | changes,
    )


FAMILIES = {
    "qwen2_moe": Family(
        package="qwen2_moe",
        modules=("Qwen2MoeSparseMoeBlock",),
        fields={**SIZES, "num_experts": EXPERTS, "shared_expert_intermediate_size": SHARED},
        moe={
            "gate": SoftmaxGateConfig(),
            "num_shared_experts": 1,
            "shared_dim": SHARED,
            "has_shared_gate": True,
        },
        shared="shared_expert",
    ),
    "qwen3_next": Family(
        package="qwen3_next",
        modules=("Qwen3NextSparseMoeBlock",),
        fields={**SIZES, "num_experts": EXPERTS, "shared_expert_intermediate_size": SHARED},
        moe={"num_shared_experts": 1, "shared_dim": SHARED, "has_shared_gate": True},
        shared="shared_expert",
    ),
    "gpt_oss": Family(
        package="gpt_oss",
        modules=("GptOssMLP",),
        fields={
            "hidden_size": WIDTH,
            "num_experts_per_tok": TOP_K,
            "intermediate_size": HIDDEN,
            "num_local_experts": EXPERTS,
            "swiglu_limit": 0.5,
        },
        moe={
            "activation": ClampedSwiGLUConfig(limit=0.5),
            "has_expert_bias": True,
            "router": SoftmaxTopKConfig(softmax="after", logit_bias=LogitBiasConfig()),
            "gate": SoftmaxGateConfig(),
        },
        router="router.weight",
        logit_bias="router.bias",
        experts=interleaved_experts,
    ),
    "deepseek_v2": Family(
        package="deepseek_v2",
        modules=("DeepseekV2Moe",),
        fields={
            **GROUPED_FIELDS,
            "topk_method": "group_limited_greedy",
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
        moe={
            "router": SoftmaxTopKConfig(groups=dataclasses.replace(GROUPS, best_per_group=1)),
            "gate": SoftmaxGateConfig(scale=2.5),
            "num_shared_experts": 2,
        },
        shared="shared_experts",
    ),
    "ernie4_5_moe": Family(
        package="ernie4_5_moe",
        modules=("Ernie4_5_MoeSparseMoeBlock",),
        fields={
            "hidden_size": WIDTH,
            "moe_intermediate_size": HIDDEN,
            "moe_num_experts": EXPERTS,
            "moe_k": TOP_K,
            "moe_num_shared_experts": 2,
        },
        moe={"router": SOFTMAX_BIASED, "num_shared_experts": 2},
        biases="gate.moe_statics.e_score_correction_bias",
        shared="shared_experts",
    ),
    "glm4_moe": grouped("glm4_moe", "Glm4MoeMoE"),
    "dots1": grouped("dots1", "Dots1MoE"),
    "exaone_moe": grouped("exaone_moe", "ExaoneMoeSparseMoEBlock"),
    "mimo_v2_flash": grouped(
        "mimo_v2_flash",
        "MiMoV2FlashMoE",
        moe={**GROUPED_MOE, "num_shared_experts": 0},
        shared=None,
    ),
    "nemotron_h": Family(
        package="nemotron_h",
        modules=("NemotronHMoE",),
        fields={**GROUPED_FIELDS, "moe_shared_expert_intermediate_size": SHARED},
        moe={
            "router": SIGMOID_GROUPED,
            "gate": RenormalizedGateConfig(scale=2.5),
            "activation": ReLUSquaredConfig(),
            "num_shared_experts": 1,
            "shared_dim": SHARED,
        },
        biases=CORRECTION,
        experts=ungated_experts,
        shared="shared_experts",
    ),
    "minimax_m2": Family(
        package="minimax_m2",
        modules=("MiniMaxM2SparseMoeBlock",),
        fields={
            "hidden_size": WIDTH,
            "num_experts_per_tok": TOP_K,
            "intermediate_size": HIDDEN,
            "num_local_experts": EXPERTS,
        },
        moe={"router": SIGMOID_BIASED},
        biases="e_score_correction_bias",
    ),
    "afmoe": Family(
        package="afmoe",
        modules=("AfmoeSparseMoeBlock",),
        fields={**SIZES, "num_experts": EXPERTS, "num_shared_experts": 2, "route_scale": 1.5},
        moe={
            "router": SIGMOID_BIASED,
            "gate": RenormalizedGateConfig(scale=1.5),
            "num_shared_experts": 2,
        },
        router="router.gate.weight",
        biases="expert_bias",
        shared="shared_experts",
    ),
    "hunyuan_v1_moe": Family(
        package="hunyuan_v1_moe",
        modules=("HunYuanMoEV1Moe",),
        fields={
            "hidden_size": WIDTH,
            "intermediate_size": HIDDEN,
            "num_experts": EXPERTS,
            "moe_topk": TOP_K,
        },
        moe={"num_shared_experts": 1},
        router="gate.wg.weight",
        shared="shared_mlp",
    ),
    "granitemoeshared": Family(
        package="granitemoeshared",
        modules=("GraniteMoeSharedMoE", "GraniteMoeSharedMLP"),
        fields={
            "hidden_size": WIDTH,
            "intermediate_size": HIDDEN,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "shared_intermediate_size": SHARED,
        },
        moe={
            "router": OVER_CHOSEN,
            "gate": SoftmaxGateConfig(),
            "num_shared_experts": 1,
            "shared_dim": SHARED,
        },
        router="router.weight",
        shared="GraniteMoeSharedMLP",
    ),
    "llama4": Family(
        package="llama4",
        modules=("Llama4TextMoe",),
        fields={
            "hidden_size": WIDTH,
            "intermediate_size": HIDDEN,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 1,
        },
        moe={
            "top_k": 1,
            "router": SigmoidTopKConfig(),
            "gate": SoftmaxGateConfig(scales_input=True),
            "num_shared_experts": 1,
        },
        router="router.weight",
        experts=straight_experts,
        shared="shared_expert",
    ),
    "phimoe": Family(
        package="phimoe",
        modules=("PhimoeSparseMoeBlock",),
        fields={
            "hidden_size": WIDTH,
            "intermediate_size": HIDDEN,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
        },
        moe={
            "top_k": 2,
            "router": SparseMixerConfig(margin=0.6),
            "gate": SoftmaxGateConfig(),
        },
        router="router.weight",
    ),
    "dbrx": Family(
        package="dbrx",
        modules=("DbrxFFN",),
        fields={
            "d_model": WIDTH,
            "ffn_config": {
                "hidden_size": WIDTH,
                "ffn_hidden_size": HIDDEN,
                "moe_num_experts": EXPERTS,
                "moe_top_k": TOP_K,
            },
        },
        moe={},
        router="router.layer.weight",
        experts=flat_experts,
    ),
    "longcat_flash": Family(
        package="longcat_flash",
        modules=("LongcatFlashMoE",),
        fields={
            "hidden_size": WIDTH,
            "expert_ffn_hidden_size": HIDDEN,
            "n_routed_experts": EXPERTS,
            "zero_expert_num": FREE,
            "moe_topk": TOP_K,
            "routed_scaling_factor": 6.0,
        },
        moe={
            "router": SOFTMAX_BIASED,
            "gate": SoftmaxGateConfig(scale=6.0),
            "zero_computation": ZeroComputationConfig(num_zero=0, num_copy=FREE, num_constant=0),
        },
        router="router.classifier.weight",
        biases="router.e_score_correction_bias",
        experts=shorter_experts,
    ),
    "cohere2_moe": Family(
        package="cohere2_moe",
        modules=("Cohere2MoeSparseMoeBlock",),
        fields={
            "hidden_size": WIDTH,
            "intermediate_size": HIDDEN,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": True,
        },
        moe={"router": SigmoidTopKConfig(), "num_shared_experts": 2},
        shared="shared_experts",
    ),
    "deepseek_v4": Family(
        package="deepseek_v4",
        modules=("DeepseekV4SparseMoeBlock",),
        fields={
            "hidden_size": WIDTH,
            "moe_intermediate_size": HIDDEN,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 1.0,
            "mlp_layer_types": ["moe"],
            "num_hidden_layers": 1,
        },
        moe={
            "router": SqrtSoftplusTopKConfig(bias=LossFreeConfig()),
            "gate": RenormalizedGateConfig(scale=1.5),
            "activation": ClampedSwiGLUConfig(limit=1.0, alpha=1.0, offset=0.0),
            "num_shared_experts": 1,
        },
        biases=CORRECTION,
        shared="shared_experts",
    ),
}


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers", reason="transformers is not installed: extra hf")
    return pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")


def their_modules(torch, family):
    """The modules with random weights."""
    package = f"transformers.models.{family.package}"
    modeling = importlib.import_module(f"{package}.modeling_{family.package}")
    configs = importlib.import_module(f"{package}.configuration_{family.package}")
    prefix = family.modules[0]
    names = [
        name
        for name in vars(configs)
        if name.endswith("Config") and name not in ("PreTrainedConfig", "PretrainedConfig")
    ]
    name = "Llama4TextConfig" if family.package == "llama4" else names[-1]
    names = [one for one in names if prefix.startswith(one.removesuffix("Config"))]
    config = getattr(configs, max(names, key=len) if names else name)(**family.fields)
    config._experts_implementation = "eager"
    if isinstance(inner := getattr(config, "ffn_config", None), dict):
        config.ffn_config = configs.DbrxFFNConfig(**inner)
    generator = torch.Generator().manual_seed(0)
    modules = []
    for name in family.modules:
        extra = (0,) if family.package == "deepseek_v4" else ()
        module = getattr(modeling, name)(config, *extra).eval()
        for tensor in (*module.parameters(), *module.buffers()):
            fan = tensor.shape[-1] if tensor.ndim > 1 else 4
            noise = torch.randn(tensor.shape, generator=generator) / fan**0.5
            tensor.data.copy_(noise)
        modules.append(module)
    return modules


def values_of(family, modules):
    """All arrays of the modules by name; those of a second module under its class."""
    values = {}
    for position, module in enumerate(modules):
        prefix = f"{type(module).__name__}." if position else ""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        values |= {prefix + name: tensor.detach().numpy() for name, tensor in tensors.items()}
    return values


def our_output(family, values, x):
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "expert_dim": HIDDEN, "balancers": ()}
    moe = MoEConfig(**moe_fields(**sizes | dict(family.moe)))
    model = ModelConfig(vocab_size=8, num_layers=1, embed_dim=WIDTH, moe=moe)
    params: dict[str, Any] = {"router": {"weight": values[family.router].T}}
    if family.logit_bias is not None:
        params["router"]["bias"] = values[family.logit_bias]
    params["experts"] = (family.experts or turned_experts)(values)
    if family.shared is not None:
        params["shared"] = dense(values, family.shared)
    if moe.extras.has_shared_gate:
        params["shared_gate"] = {"weight": values[f"{family.shared}_gate.weight"].T}
    state = {}
    if family.biases is not None:
        state = {"bias": jnp.asarray(values[family.biases].reshape(-1))}
    mask = jnp.ones((ROWS, LENGTH), bool)
    routing = RoutingInputs(token_mask=mask, segment_ids=mask.astype(jnp.int32), router_state=state)
    layer = MoELayer(moe, model.context, ExecutionConfig(), train=False)
    arrays = jax.tree.map(jnp.asarray, params)
    return jax.jit(lambda p, x: layer.apply({"params": p}, x, routing)[0])(arrays, x)


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_layers_equal_those_of_transformers(torch, name):
    family = FAMILIES[name]
    modules = their_modules(torch, family)
    x = np.random.default_rng(7).standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
    total = 0.0
    with torch.no_grad():
        for module in modules:
            y = module(torch.tensor(x))
            y = y[0] if isinstance(y, tuple) else y
            total = total + y.reshape(x.shape).numpy()
    ours = our_output(family, values_of(family, modules), jnp.asarray(x))
    assert np.abs(total).mean() > 0.05
    assert_close(ours, total, "matmul")
