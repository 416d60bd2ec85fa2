# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Presets against published parameter counts.

Totals of the published models are the parameter counts of their repositories on the Hub; they and
the active ones are worked out beside them. To add a preset: a row in COUNTS.
"""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from jaxmoe.models.flops import flops_per_token
from jaxmoe.models.presets import (
    LADDER_DEPTHS,
    PRESETS,
    ladder,
    ladder_tokens,
)
from jaxmoe.models.sizing import dense_parameters
from jaxmoe.routing import RouterStatistics
from jaxmoe.scaling.initialize import parameter_table


def published(vocab, width, layers, heads, kv_heads, norms, experts, top_k, hidden):
    """Total and active parameters of an untied model, from the numbers of its config.json."""
    layer = 2 * width * 128 * (heads + kv_heads) + norms + experts * width
    expert = 3 * width * hidden
    whole = 2 * vocab * width + width
    return tuple(whole + layers * (layer + n * expert) for n in (experts, top_k))


COUNTS = {
    "olmoe_1b_7b": (6_919_161_856, 1_282_017_280),
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248),
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704),
}
ARITHMETIC = {
    # QK-norm of OLMoE spans all heads, that of Qwen3 one head; Mixtral has none.
    "olmoe_1b_7b": (50_304, 2048, 16, 16, 16, 4 * 2048, 64, 8, 1024),
    "mixtral_8x7b": (32_000, 4096, 32, 32, 8, 2 * 4096, 8, 2, 14_336),
    "qwen3_30b_a3b": (151_936, 2048, 48, 32, 4, 2 * 2048 + 2 * 128, 128, 8, 768),
}


def counts(name):
    model = PRESETS[name]()
    table = parameter_table(model)
    return table.total, table.active(model.moe.top_k, model.moe.num_experts)


@pytest.mark.parametrize("name", COUNTS)
def test_published_sizes(name):
    assert COUNTS[name] == published(*ARITHMETIC[name])
    assert counts(name) == COUNTS[name]


def test_published_names_state_total_and_active_parameters():
    """7B with 1B active, 47B with 13B, 30B with 3B."""
    rounded = {name: tuple(round(n / 1e9, 1) for n in counts(name)) for name in COUNTS}
    assert rounded == {
        "olmoe_1b_7b": (6.9, 1.3),
        "mixtral_8x7b": (46.7, 12.9),
        "qwen3_30b_a3b": (30.5, 3.4),
    }


def test_olmoe_balance_losses_equal_its_training_code():
    """A uniform router gives 0.01 over all 16 layers, and 0.001 / top_k of the z-loss."""
    layers, experts, tokens = 16, 64, 4
    even = RouterStatistics(
        num_tokens=jnp.full(layers, float(tokens)),
        counts=jnp.full((layers, experts), tokens * 8 / experts),
        kept=jnp.full((layers, experts), tokens * 8 / experts),
        prob_sum=jnp.full((layers, experts), tokens / experts),
        z_sum=jnp.full(layers, float(tokens)),
        entropy_sum=jnp.zeros(layers),
    )
    balance, z = PRESETS["olmoe_1b_7b"]().moe.balancers
    assert float(balance.loss(even)) == pytest.approx(0.01)
    assert float(z.loss(even)) == pytest.approx(0.001 / 8)


# Depth: parameters of the dense model, billions of the mixture and of tokens, whole steps of 2^21
# tokens, and training FLOPs: the tables of arXiv 2603.28743.
LADDER = {
    8: (208_142_336, "0.913", "10.400", 4_959, "2.136e+19"),
    12: (570_163_200, "2.950", "28.489", 13_584, "1.491e+20"),
    16: (1_238_368_256, "6.879", "61.876", 29_504, "6.591e+20"),
    20: (2_313_420_800, "13.329", "115.592", 55_118, "2.186e+21"),
    24: (3_895_984_128, "22.930", "194.666", 92_823, "5.961e+21"),
}


def test_ladder_has_a_preset_per_depth():
    assert tuple(LADDER) == LADDER_DEPTHS
    names = {name for name in PRESETS if re.fullmatch(r"d\d+", name)}
    assert names == {f"d{depth}" for depth in LADDER_DEPTHS}


@pytest.mark.parametrize("depth", LADDER)
def test_ladder_equals_the_tables_of_hyperp(depth):
    dense, total, tokens, steps, flops = LADDER[depth]
    model = ladder(depth, num_experts=63)
    table = parameter_table(model)
    assert f"{table.total / 1e9:.3f}" == total
    # 8 experts of half the width are the dense model's one of four times the width. What the dense
    # count leaves out is small.
    left_out = ("router", "attention_gate", "norm")
    small = sum(row.size for row in table if row.declaration.role in left_out)
    assert dense_parameters(ladder(depth)) == dense == table.active(7, 63) - small
    assert f"{ladder_tokens(depth) / 1e9:.3f}" == tokens
    assert ladder_tokens(depth) // 2**21 == steps
    # The paper counts the embedding among the products, and attention without its causal half.
    per_token = 6 * dense + 12 * depth * (2 * depth * 128) * 4096
    assert f"{ladder_tokens(depth) * per_token:.3e}" == flops


@pytest.mark.parametrize("depth", LADDER)
def test_the_experts_of_the_ladder_divide_over_powers_of_two_of_devices(depth):
    model, paper = ladder(depth), ladder(depth, num_experts=63)
    assert (model.moe.num_experts, model.moe.top_k, model.moe.num_shared_experts) == (64, 7, 1)
    assert dataclasses.replace(model, moe=paper.moe) == paper
    # Tokens, steps and rates follow from the dense equivalent.
    assert dense_parameters(model) == dense_parameters(paper)


def test_flops_of_ladder_depth_8():
    """Ours leave the embedding out, halve attention, and count the router and the gates."""
    model = ladder(8)
    width, length = 1024, 4096
    products = dense_parameters(ladder(8)) - 32_000 * width + 8 * width * (64 + 16)
    wanted = 6 * products + 12 * 8 * (16 * 128) * length / 2
    assert flops_per_token(model, parameter_table(model), length) == wanted


@pytest.mark.parametrize("depth", [0, 7])
def test_odd_or_zero_ladder_depth_is_refused(depth):
    with pytest.raises(ValueError, match=f"^the ladder has even depths from 2 on, not {depth}: "):
        ladder(depth)
