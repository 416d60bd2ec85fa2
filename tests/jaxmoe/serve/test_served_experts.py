# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Experts of prompt and answer against one whole pass, whatever is shared, preempted or swapped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.depth.loop import LoopConfig
from jaxmoe.contrib.fleet.moves import fork
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import forward
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.routing.replay import EXPERTS
from jaxmoe.routing.telemetry import summarise
from jaxmoe.routing.telemetry.recording import record_router, recorded_ids
from jaxmoe.serve import Request, Sampling, Token
from jaxmoe.serve.answers import Generated, whole_experts
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.offline import Prompt, answer_all
from jaxmoe.serve.policies.batching import SplitFuseConfig
from jaxmoe.training.loss import forward_and_nll
from tests.jaxmoe.serve.test_served_tokens import Swapping
from tests.support.serving import (
    LONGEST,
    MODEL,
    ROWS,
    SIZES,
    VOCAB,
    Smaller,
    executor,
    params,
    serve,
)

COMMON = (7, 2, 11, 5, 3, 19, 8, 1, 13)
ASKED = {
    id_: (
        (*COMMON, *np.random.default_rng(id_).integers(0, VOCAB, 1 + id_).tolist()),
        Sampling(max_tokens=7, temperature=1.0, seed=id_, has_experts=id_ != 2),
    )
    for id_ in range(6)
}
"""Prompts with a common beginning; one of them does not ask for its experts."""
TOKENS = ROWS * (LONGEST + 1)
RECORDING = dataclasses.replace(MODEL, moe=record_router(MODEL.moe, TOKENS))


def joined(served, run):
    """Experts of each request and what was served, with a function of a step."""
    parts = {}

    def kept(step):
        results = run(step)
        for id_, result in results.items():
            parts.setdefault(id_, []).append(result.experts)
        return results

    found = served(kept)
    return {id_: np.concatenate(own) for id_, own in parts.items() if own[0] is not None}, found


@jax.jit
def _ids(tokens):
    output = forward(RECORDING, ExecutionConfig(), params(), tokens, has_logits=False)
    return output.statistics


def check_experts(experts, requests, answers):
    """Assert that the experts are those of one whole pass over each prompt and its answer."""
    tokens = np.zeros((ROWS, LONGEST + 1), np.int32)
    for row, id_ in enumerate(experts):
        whole = (*requests[id_][0], *answers[id_])
        tokens[row, : len(whole)] = whole
    wanted = recorded_ids(_ids(jnp.asarray(tokens))).transpose(1, 0, 2)
    wanted = wanted.reshape(ROWS, LONGEST + 1, *wanted.shape[1:])
    for row, id_ in enumerate(experts):
        length = len(requests[id_][0]) + len(answers[id_]) - 1
        assert experts[id_].dtype == np.uint8 and experts[id_].shape == (length, 1, 2)
        np.testing.assert_array_equal(experts[id_], wanted[row, :length])


def run_of(sizes, *, policy=None, has_sharing=True, run=None):
    arrivals = {id_: id_ for id_ in ASKED}
    given = {"policy": policy, "sizes": sizes, "has_sharing": has_sharing}
    return joined(lambda kept: serve(ASKED, arrivals, run=kept, **given), run or executor().run)


@functools.cache
def unshared():
    return run_of(Smaller(), has_sharing=False)


def test_experts_are_those_of_the_whole_pass():
    experts, found = unshared()
    assert set(experts) == set(ASKED) - {2} and found.instance.num_cached == 0
    check_experts(experts, ASKED, found.answers)


@pytest.mark.parametrize(
    ("sizes", "policy"),
    [(Smaller(), None), (Smaller(7), None), (Smaller(12), Swapping(budget=8))],
    ids=["shared", "preempted", "swapped"],
)
def test_experts_are_whole_with_shared_preempted_and_swapped_pages(sizes, policy):
    """Equal to those without sharing, although fewer tokens were computed, or some twice."""
    experts, found = run_of(sizes, policy=policy)
    assert found.answers == unshared()[1].answers
    jax.tree.map(np.testing.assert_array_equal, experts, unshared()[0])
    assert found.instance.num_cached > 0
    assert found.instance.num_preempted > 0 or sizes.num_pages == 32


def test_experts_of_a_fork_begin_with_those_of_the_pages_that_it_shares():
    sampling = Sampling(max_tokens=6, temperature=1.0, seed=3, has_experts=True)
    facts, policy = Smaller().facts(), SplitFuseConfig(budget=8)
    plan, instance = policy.build(facts), Instance(facts, policy.name)
    asked, answers = {0: ((5, 4, 3, 2, 1), sampling)}, {0: [], 1: []}
    instance.submit(Request(id=0, prompt=asked[0][0], sampling=sampling), 0.0)

    def serve_all(run):
        while not instance.is_idle:
            if len(answers[0]) == 2 and 1 not in asked:
                asked[1] = ((*asked[0][0], *answers[0]), dataclasses.replace(sampling, seed=8))
                request = Request(id=1, prompt=asked[1][0], sampling=asked[1][1])
                assert fork(instance, 0, request, 0.0) == () and instance.copies
            for step in instance.start(plan(instance.view(0.0)), 0.0):
                for event in instance.apply(step, run(step), 0.0):
                    if isinstance(event, Token):
                        answers[event.id].append(event.result.token)

    experts, _ = joined(serve_all, executor().run)
    check_experts(experts, asked, answers)


def test_streams_and_whole_answers_have_the_experts():
    """The answers are a group of one prompt, whose pages are shared."""
    sampling = Sampling(max_tokens=3, seed=4, has_experts=True)
    with Engine(Smaller()) as engine:
        events = [list(one) for one in engine.submit_samples(COMMON, sampling, 3)]
        plain = list(engine.submit(COMMON, Sampling(max_tokens=2)))
    answers = {
        i: [event.token for event in own if isinstance(event, Generated)]
        for i, own in enumerate(events)
    }
    experts = {i: whole_experts(own) for i, own in enumerate(events)}
    check_experts(experts, dict.fromkeys(answers, (COMMON, sampling)), answers)
    assert whole_experts(plain) is None
    (answer,) = answer_all(Smaller(), [Prompt(tokens=COMMON, sampling=sampling)])
    np.testing.assert_array_equal(answer.experts, experts[0])


def test_experts_that_a_loop_would_choose_twice_are_refused():
    looped = dataclasses.replace(MODEL, loop=LoopConfig())
    with pytest.raises(ValueError, match="model.loop.times=2"):
        ModelExecutor(looped, {}, config=SIZES)


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_experts_of_few_bit_pages_are_replayed_and_those_that_differ_are_counted(form):
    """The trainer, without rounded keys, takes every expert that the engine has chosen."""
    execution = ExecutionConfig(precision=PrecisionPolicy(cache=form))
    served = ModelExecutor(MODEL, params(), config=SIZES, execution=execution)
    experts, found = run_of(Smaller(), run=served.run)
    shape = (ROWS, LONGEST + 1)
    tokens, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    record = np.full((*shape, 1, 2), -1, np.int16)
    for row, (id_, own) in enumerate(experts.items()):
        end = len(own)
        tokens[row, :end] = (*ASKED[id_][0], *found.answers[id_][:-1])
        record[row, :end], weights[row, :end] = own, 1.0
    rows = Batch(
        tokens=tokens,
        targets=tokens,
        loss_weights=weights,
        segment_ids=(weights > 0).astype(np.int32),
        extra={EXPERTS: record},
    )

    @jax.jit
    def statistics(rows):
        return forward_and_nll(RECORDING, ExecutionConfig(), params(), rows, train=True)[1]

    def chosen(rows):
        output = statistics(jax.tree.map(jnp.asarray, rows))
        return recorded_ids(output.statistics).reshape(record.shape), output.statistics

    ids, counted = chosen(rows)
    is_real = weights > 0
    np.testing.assert_array_equal(ids[is_real], record[is_real])
    own, _ = chosen(dataclasses.replace(rows, extra={}))
    differs = 1.0 - (own[is_real][..., :, None] == record[is_real][..., None, :]).any(-1).mean()
    scalars = summarise(counted)
    assert scalars["replayed"] == 1.0
    np.testing.assert_allclose(scalars["replay_changed"], differs, atol=1e-6)
    assert differs > 0.0 or form == "int8", "8 bits move no token of so small a model"
