# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes: functions that return the configuration of a run, named for model, data or hardware.

To add a recipe: `experiments/recipes/tiny.py` as the example (its docstring gives command,
hardware, time and the number to expect), and `_ALL` in `experiments/recipes/__init__.py`.
"""

from experiments.recipes.diffusion import diffusion
from experiments.recipes.hybrid import hybrid
from experiments.recipes.hyperp import hyperp
from experiments.recipes.ladder import d8, d12, d16, d20, d24
from experiments.recipes.languages import languages
from experiments.recipes.markov import markov
from experiments.recipes.published import (
    deepseek_v2_lite,
    deepseek_v3,
    glm_4_5_air,
    gpt_oss_20b,
    gpt_oss_120b,
    minimax_m2,
    mixtral_8x7b,
    olmoe_1b_7b,
    qwen3_30b_a3b,
    qwen3_235b_a22b,
    qwen3_next_80b_a3b,
)
from experiments.recipes.tiny import tiny

DEFAULT = "tiny"

_ALL = (
    tiny,
    hybrid,
    hyperp,
    markov,
    languages,
    diffusion,
    d8,
    d12,
    d16,
    d20,
    d24,
    olmoe_1b_7b,
    deepseek_v2_lite,
    gpt_oss_20b,
    qwen3_30b_a3b,
    mixtral_8x7b,
    qwen3_next_80b_a3b,
    glm_4_5_air,
    gpt_oss_120b,
    minimax_m2,
    qwen3_235b_a22b,
    deepseek_v3,
)
RECIPES = {recipe.__name__: recipe for recipe in _ALL}
