# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Published models of 7e9 to 671e9 parameters, to be trained from scratch, described and planned.

    jaxmoe describe deepseek_v3
    jaxmoe plan gpt_oss_20b --topology tpu:v5p:4x4x4

    recipe               parameters   active    experts a token         of
    olmoe_1b_7b              6.92e9   1.28e9          8                 64
    deepseek_v2_lite         15.7e9   2.66e9          6 and 2 shared    64
    gpt_oss_20b              20.9e9   4.19e9          4                 32
    qwen3_30b_a3b            30.5e9   3.35e9          8                128
    mixtral_8x7b             46.7e9   12.9e9          2                  8
    qwen3_next_80b_a3b       79.7e9   3.87e9         10 and 1 shared   512
    glm_4_5_air               107e9   13.4e9          8 and 1 shared   128
    gpt_oss_120b              117e9   5.71e9          4                128
    minimax_m2                229e9   11.0e9          8                256
    qwen3_235b_a22b           235e9   22.2e9          8                128
    deepseek_v3               671e9   37.6e9          8 and 1 shared   256

Sizes, router and balance losses are the papers' (`jaxmoe.models.presets`); data, batch, optimiser
(AdamW, its rate not tuned) and schedule are those of `large`, not the papers': 305 steps of 2^17
tokens pass over the embedded corpus four times. The backward pass of a recipe repeats no product
(`--execution.remat dots`) where that fits into the accelerators that it names by the closed form of
`plan`, else less (`kernels`) or everything (`full`). Where micro-batches are added up the update is
the peak, and `dots` takes no more memory than `full`; smaller accelerators, or one sequence on each
without micro-batches, may need `full`. Trained weights are read from the models'
directories (`jaxmoe finetune DIR`). None of these runs was made: tested are sizes,
and that each is the model of its published config.json.

To add a model: a preset, and a function here.
"""

from experiments.recipes.ladder import large
from experiments.recipes.recipe import recipe
from jaxmoe import catalog
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import AttentionConfig, LayerConfig, ModelConfig, MoEConfig
from jaxmoe.models.presets import PRESETS
from jaxmoe.routing import METHODS
from jaxmoe.run.config import PretrainConfig


@recipe
def olmoe_1b_7b() -> PretrainConfig:
    """OLMoE-1B-7B: 6.92e9 parameters, 1.28e9 active, 8 of 64 experts.

    jaxmoe pretrain olmoe_1b_7b

    Two accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["olmoe_1b_7b"](), learning_rate=4e-4, remat="dots")


@recipe
def mixtral_8x7b() -> PretrainConfig:
    """Mixtral-8x7B: 46.7e9 parameters, 12.9e9 active, 2 of 8 experts.

    jaxmoe pretrain mixtral_8x7b

    Eight accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["mixtral_8x7b"](), learning_rate=2e-4)


@recipe
def qwen3_30b_a3b() -> PretrainConfig:
    """Qwen3-30B-A3B: 30.5e9 parameters, 3.35e9 active, 8 of 128 experts.

    jaxmoe pretrain qwen3_30b_a3b

    Eight accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["qwen3_30b_a3b"](), learning_rate=2e-4, remat="dots")


@recipe
def deepseek_v2_lite() -> PretrainConfig:
    """DeepSeek-V2-Lite: 15.7e9 parameters, 2.66e9 active, 6 of 64 experts and 2 shared.

    jaxmoe pretrain deepseek_v2_lite

    Four accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["deepseek_v2_lite"](), learning_rate=0.00042, remat="dots")


@recipe
def gpt_oss_20b() -> PretrainConfig:
    """gpt-oss-20b: 20.9e9 parameters, 4.19e9 active, 4 of 32 experts.

    jaxmoe pretrain gpt_oss_20b

    Four accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["gpt_oss_20b"](), learning_rate=0.0002)


@recipe
def glm_4_5_air() -> PretrainConfig:
    """GLM-4.5-Air: 107e9 parameters, 13.4e9 active, 8 of 128 experts and one shared.

    jaxmoe pretrain glm_4_5_air

    32 accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["glm_4_5_air"](), learning_rate=0.0002, remat="dots")


@recipe
def gpt_oss_120b() -> PretrainConfig:
    """gpt-oss-120b: 117e9 parameters, 5.71e9 active, 4 of 128 experts.

    jaxmoe pretrain gpt_oss_120b

    32 accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["gpt_oss_120b"](), learning_rate=0.0002, remat="dots")


@recipe
def minimax_m2() -> PretrainConfig:
    """MiniMax-M2: 229e9 parameters, 11.0e9 active, 8 of 256 experts.

    jaxmoe pretrain minimax_m2

    64 accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["minimax_m2"](), learning_rate=0.0002, remat="dots")


@recipe
def qwen3_235b_a22b() -> PretrainConfig:
    """Qwen3-235B-A22B: 235e9 parameters, 22.2e9 active, 8 of 128 experts.

    jaxmoe pretrain qwen3_235b_a22b

    64 accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["qwen3_235b_a22b"](), learning_rate=0.0002, remat="kernels")


@recipe
def deepseek_v3() -> PretrainConfig:
    """DeepSeek-V3: 671e9 parameters, 37.6e9 active, 8 of 256 experts and one shared.

    jaxmoe pretrain deepseek_v3

    128 accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["deepseek_v3"](), learning_rate=0.00022)


@recipe
def qwen3_next_80b_a3b() -> PretrainConfig:
    """Qwen3-Next-80B-A3B: 79.7e9 parameters, 3.87e9 active, 10 of 512 experts and one shared.

    jaxmoe pretrain qwen3_next_80b_a3b

    Three layers of four have a Gated DeltaNet in place of attention. 16 accelerators of 140 GB or
    more; not run yet.
    """
    recurrent = catalog.choice("mixer", "gated_delta")
    mixer = recurrent(num_heads=32, num_key_heads=16, head_dim=128, key_dim=128)
    layer = LayerConfig(mixer=mixer)
    model = ModelConfig(
        vocab_size=151_936,
        num_layers=48,
        embed_dim=2048,
        attention=AttentionConfig(
            num_heads=16,
            num_kv_heads=2,
            head_dim=256,
            is_gated=True,
            rope_theta=1e7,
            options=AttentionOptions(rotary_dim=64, gate_form="element"),
        ),
        layers=(layer, layer, layer, LayerConfig()),
        moe=MoEConfig(
            num_experts=512,
            top_k=10,
            expert_dim=512,
            num_shared_experts=1,
            options=MoEOptions(has_shared_gate=True),
            **METHODS["qwen3"].parts(),
        ),
        dense_dim=5120,
        norm=catalog.choice("norm", "centred_rms")(),
    )
    return large(model, learning_rate=2e-4)
