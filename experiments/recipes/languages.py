# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Several languages with disjoint vocabularies: the right expert of each token is known."""

import dataclasses

from experiments.recipes.markov import markov
from experiments.recipes.recipe import recipe
from jaxmoe import data
from jaxmoe.run.config import PretrainConfig


@recipe
def languages() -> PretrainConfig:
    """A mixture of disjoint languages with exactly known entropy.

    jaxmoe pretrain languages
    """
    source = data.LanguageMixtureConfig()
    config = markov()
    model = dataclasses.replace(config.model, vocab_size=source.build().vocab_size)
    return dataclasses.replace(config, model=model, data=source)
