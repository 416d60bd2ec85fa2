# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes: functions that return a whole config, named for model, data or hardware.

To add one: a file with a function whose docstring says command, hardware, time and the number to
expect, and a line in RECIPES.
"""

from experiments.recipes.languages import languages
from experiments.recipes.markov import markov
from experiments.recipes.tiny import tiny

DEFAULT = "tiny"

RECIPES = {"tiny": tiny, "markov": markov, "languages": languages}
