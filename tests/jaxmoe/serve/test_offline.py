# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that are answered together, without a server: each as if it were alone."""

import dataclasses

import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.generation.text import GenerationConfig, LoadedModel, continue_texts
from jaxmoe.models.sampling import SamplingConfig
from jaxmoe.routing import UniformRandomConfig
from jaxmoe.serve import Sampling
from jaxmoe.serve.device.backend import sizes_for
from jaxmoe.serve.offline import Prompt, ServingError, answer_all, continue_together
from tests.support.diffusion import POINTWISE
from tests.support.serving import MODEL, Smaller, check_answers, params
from tests.support.texts import Letters

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [3, 2]]


def test_more_prompts_than_places_are_answered_in_order():
    asked = [
        Prompt(tokens=(number, 2), sampling=Sampling(max_tokens=3 + number, temperature=0.0))
        for number in range(6)
    ]
    found = answer_all(Smaller(), asked, Letters())
    given = {row: (one.tokens, one.sampling) for row, one in enumerate(asked)}
    check_answers(given, {row: list(answer.tokens) for row, answer in enumerate(found)})
    for one, answer in zip(asked, found, strict=True):
        assert answer.reason == "length" and len(answer.tokens) == one.sampling.max_tokens
        assert answer.text == Letters().decode(answer.tokens)
    with pytest.raises(ServingError, match="shorten the prompt"):
        answer_all(Smaller(), [Prompt(tokens=(1,) * 40)])


def test_sizes_hold_every_prompt():
    found = sizes_for(max_length=300, batch_size=4)
    assert found.num_pages == 4 * 19 and found.context_lengths == (256, 300)
    assert sizes_for(max_length=48, batch_size=2).context_lengths == (48,)


def loaded(model):
    return LoadedModel(config=model, params=params(model), router_state={})


@pytest.mark.slow
def test_texts_continued_together_equal_each_alone():
    given = GenerationConfig(
        length=9, sampling=SamplingConfig(temperature=0.9, top_k=8), seed=3, eos_ids=(5, 11)
    )
    together = continue_together(loaded(MODEL), Letters(), PROMPTS, given, precision="f32")
    for row, (prompt, sample) in enumerate(zip(PROMPTS, together, strict=True)):
        own = dataclasses.replace(given, seed=3 + row)
        alone = continue_texts(loaded(MODEL), Letters(), [prompt], own, precision="f32")[0]
        assert sample == alone and sample.token_ids == alone.token_ids
    router = dataclasses.replace(MODEL.moe, router=UniformRandomConfig(), balancers=())
    other = loaded(dataclasses.replace(MODEL, moe=router))
    other = dataclasses.replace(other, execution=ExecutionConfig())
    found = continue_together(other, Letters(), PROMPTS, given)
    wanted = continue_texts(other, Letters(), PROMPTS, given)
    assert found == wanted


@pytest.mark.slow
@pytest.mark.vertical("diffusion")
def test_texts_filled_in_together_equal_each_alone():
    given = GenerationConfig(
        length=4, sampling=SamplingConfig(temperature=0.9, top_p=0.9), seed=3, stop=("q",)
    )
    pointwise, prompts = loaded(POINTWISE), [[1, 2, 3], [4], [5, 6]]
    together = continue_together(pointwise, Letters(), prompts, given)
    for row, (prompt, sample) in enumerate(zip(prompts, together, strict=True)):
        own = dataclasses.replace(given, seed=3 + row)
        assert [sample] == continue_texts(pointwise, Letters(), [prompt], own)
