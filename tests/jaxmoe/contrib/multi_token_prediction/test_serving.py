# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serving with drafts of modules: the tokens of whole forward passes, in fewer steps."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.contrib.fleet.timing import measure_steps
from jaxmoe.contrib.multi_token_prediction.drafts import DraftPrograms
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, LatentAttentionConfig
from jaxmoe.models.decode import stream
from jaxmoe.models.sampling import SamplingConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.serve import Sampling, Shapes
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.policies.batching import SplitFuseConfig
from jaxmoe.serve.sizes import EngineSizesConfig
from sharding.mesh import MeshConfig, make_mesh
from tests.jaxmoe.contrib.multi_token_prediction.test_drafts import FEW, model_of
from tests.jaxmoe.serve.test_served_tokens import Swapping
from tests.support.serving import LONGEST, Smaller, check_answers, params, serve

SIZES = ExecutorConfig(
    num_pages=32,
    page_size=4,
    shapes=Shapes(singles=3, pieces=((2, 5),)),
    context_lengths=(LONGEST,),
    drafts=True,
)


@functools.cache
def model_with(depth):
    """Two layers with experts, or one that compiles in seconds; or latent attention."""
    if depth == "latent":
        attention = LatentAttentionConfig(
            num_heads=4, latent_dim=8, nope_dim=4, rope_dim=4, value_dim=4
        )
        return dataclasses.replace(model_of(1), attention=attention)
    model = model_of(depth)
    if depth == 1:
        model = dataclasses.replace(model, num_layers=1, moe=None, dense_dim=24)
    return model


@functools.cache
def drafting(depth):
    return ModelExecutor(model_with(depth), params(model_with(depth)), config=SIZES)


def served(depth, requests, *, pages=SIZES.num_pages, policy=None, has_sharing=True):
    """Serve with drafts, and compare all answers with whole forward passes."""
    steps = []
    made = functools.partial(drafting, depth)
    result = serve(
        requests,
        {number: number for number in requests},
        sizes=Smaller(pages, executor=made),
        policy=policy,
        has_sharing=has_sharing,
        run=lambda step: steps.append(step) or made().run(step),
        steps_ahead=0,
    )
    check_answers(requests, result.answers, model_with(depth))
    return result, len(steps)


def mixed():
    """Return greedy and sampled requests that begin alike, more than run together."""
    rng = np.random.default_rng(1)
    common = rng.integers(0, FEW, 9).tolist()
    filters = ({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.05}, {}, {})
    return {
        number: (
            (*(common if number % 2 else ()), *rng.integers(0, FEW, 3 + number).tolist()),
            Sampling(
                max_tokens=9 + number, temperature=temperature, seed=number, **filters[number]
            ),
        )
        for number, temperature in enumerate((0.0, 0.7, 1.3, 0.8, 1.0, 0.0))
    }


DEPTHS = [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("depth", [*DEPTHS, pytest.param("latent", marks=pytest.mark.slow)])
def test_tokens_are_those_of_whole_forward_passes(depth):
    """Greedy, sampled and filtered; with shared beginnings, preemption, swaps, and both ends."""
    requests = mixed()
    result, num_steps = served(depth, requests)
    instance = result.instance
    assert 0 < instance.num_accepted < instance.num_guessed and instance.num_cached > 0
    number = sum(map(len, result.answers.values()))
    assert number == sum(sampling.max_tokens for _, sampling in requests.values())
    print(depth, number, num_steps, instance.num_guessed, instance.num_accepted)
    busy, _ = served(depth, requests, pages=9, policy=SplitFuseConfig(budget=8))
    assert busy.answers == result.answers and busy.instance.num_preempted > 0
    swapped, _ = served(depth, requests, pages=12, policy=Swapping(budget=8), has_sharing=False)
    assert swapped.answers == result.answers and swapped.instance.num_preempted > 0
    ends = {
        id_: (prompt, dataclasses.replace(sampling, stop_ids=(2, 4)))
        for id_, (prompt, sampling) in requests.items()
    }
    ended, _ = served(depth, ends)
    for id_, answer in ended.answers.items():
        whole = result.answers[id_]
        places = [place for place, token in enumerate(whole) if token in (2, 4)]
        assert answer == (whole[: places[0] + 1] if places else whole)


@pytest.mark.parametrize("depth", DEPTHS)
def test_drafts_are_those_of_a_generation(depth):
    """One page holds all tokens, so that none of them is left out."""
    model = model_with(depth)
    prompt, num_tokens, seed = [1, 2, 3, 0, 4, 1, 2], 20, 3
    programs = DraftPrograms()
    sampling = SamplingConfig(temperature=0.7)
    parts = stream(
        model,
        params(model),
        [prompt],
        num_tokens=num_tokens,
        key=jax.random.key(seed),
        sampling=sampling,
        programs=programs,
        at_once=32,
    )
    tokens = np.concatenate([*parts], axis=1)[0].tolist()
    sizes = dataclasses.replace(SIZES, page_size=LONGEST, num_pages=2)
    with Engine(ModelExecutor(model, params(model), config=sizes)) as engine:
        asked = Sampling(max_tokens=num_tokens, temperature=0.7, seed=seed)
        answer = [*engine.submit(prompt, asked)]
    metrics = engine.metrics  # those of the last step are known when the engine has ended
    assert [event.token for event in answer[:-1]] == tokens
    report = programs.report
    assert metrics.num_steps == 2 + report.num_passes  # two pieces of the prompt
    # The last pass has room for fewer guesses here, and all that it accepts are written.
    assert metrics.drafts_accepted == num_tokens - 1 - report.num_passes
    assert 0 <= report.num_accepted - metrics.drafts_accepted <= depth


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"expert": 2, "tensor": 2}, {"expert": 2}], ids=str)
def test_tokens_on_a_mesh_are_those_of_one_device(sizes):
    model = dataclasses.replace(
        model_with(2),
        vocab_size=FEW + 1,  # which divides by the axis
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
    )
    config = MeshConfig(**sizes)
    mesh = make_mesh(config, jax.devices()[: math.prod(config.sizes)])
    execution = ExecutionConfig(mesh=config)
    table = parameter_table(model, rules=execution.axis_rules)
    spread = jax.device_put(params(model), table.tree(lambda row: NamedSharding(mesh, row.spec)))
    on_mesh = ModelExecutor(model, spread, config=SIZES, execution=execution, mesh=mesh)
    requests = mixed()
    options = {"sizes": Smaller(executor=lambda: on_mesh), "steps_ahead": 0}
    result = serve(requests, {number: number for number in requests}, run=on_mesh.run, **options)
    check_answers(requests, result.answers, model)
    assert 0 < result.instance.num_accepted < result.instance.num_guessed


def test_steps_with_drafts_are_timed():
    timings = measure_steps(drafting(1), SIZES, 1, min)
    assert len(timings) == 2 and all(timing.seconds > 0 for timing in timings)
    drafting(1).reset()


def test_what_cannot_draft_is_refused_before_anything_is_compiled():
    model = model_with(1)
    plain = dataclasses.replace(model, options=None)
    with pytest.raises(ValueError, match="model.options.predictor is not set: serve it without"):
        ModelExecutor(plain, params(plain), config=SIZES)
    with pytest.raises(ValueError, match="with the adapters sql: serve it without drafts"):
        ModelExecutor(model, params(model), config=SIZES, adapters=("sql",))
    sizes = EngineSizesConfig(drafts=True)
    assert sizes.executor(LONGEST).drafts
