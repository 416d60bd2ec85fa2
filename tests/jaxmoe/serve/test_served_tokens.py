# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers against one whole forward pass, whatever is served beside them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.fleet.moves import fork
from jaxmoe.serve import Request, Sampling, Shapes, Token
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.plan import Eviction
from jaxmoe.serve.policies.batching import PrefillFirstConfig, SplitFuseConfig
from tests.support.serving import (
    SIZES,
    VOCAB,
    Smaller,
    check_answers,
    executor,
    expected,
    logits_of,
    serve,
)

requests = st.lists(
    st.tuples(
        st.booleans(),  # begins as others do
        st.integers(1, 12),  # further tokens of the prompt
        st.tuples(st.integers(1, 9), st.sampled_from([0.0, 0.7, 1.3]), st.integers(0, 9)),
        st.integers(0, 12),  # arrival
        st.one_of(st.none(), st.integers(0, 25)),  # cancellation
        st.integers(0, 2),  # priority
    ),
    min_size=1,
    max_size=8,
)
SHAPES = (
    SIZES.shapes,
    Shapes(singles=1, pieces=((1, 5),)),
    Shapes(singles=2, pieces=((2, 3),)),
)


def check_served(drawn, sizes, policy, *, has_sharing, steps_ahead=1):
    rng = np.random.default_rng(len(drawn))
    common = rng.integers(0, VOCAB, 9).tolist()
    given, arrivals, cancels, priorities = {}, {}, {}, {}
    for id_, (is_common, length, drawing, arrival, cancel, priority) in enumerate(drawn):
        max_tokens, temperature, seed = drawing
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
        prompt = (*(common if is_common else ()), *rng.integers(0, VOCAB, length).tolist())
        given[id_], arrivals[id_], priorities[id_] = (prompt, sampling), arrival, priority
        if cancel is not None:
            cancels[id_] = cancel
    found = serve(
        given,
        arrivals,
        cancels=cancels,
        priorities=priorities,
        sizes=sizes,
        policy=policy,
        has_sharing=has_sharing,
        steps_ahead=steps_ahead,
    )
    check_answers(given, found.answers)
    for id_, (prompt, sampling) in given.items():
        room = sizes.facts().max_length - len(prompt)
        if found.reasons[id_] == "length":
            assert len(found.answers[id_]) == min(sampling.max_tokens, room)
        else:
            assert found.reasons[id_] == "cancelled" and id_ in cancels
    return found


@settings(max_examples=4)
@given(requests, st.sampled_from([6, 9, 32]), st.sampled_from(SHAPES), st.booleans())
def test_tokens_do_not_depend_on_other_requests(drawn, pages, shapes, has_sharing):
    """Greedy and sampled, over arrivals, lengths, pages, shapes, cancellations, priorities."""
    policy = SplitFuseConfig(budget=8)
    check_served(drawn, Smaller(pages, shapes), policy, has_sharing=has_sharing)


@pytest.mark.slow
@settings(max_examples=40)
@given(requests, st.sampled_from([6, 7, 9, 12, 32]), st.sampled_from(SHAPES), st.data())
def test_tokens_do_not_depend_on_policies_and_sizes(drawn, pages, shapes, data):
    policies = [SplitFuseConfig(budget=budget) for budget in (2, 8)] + [PrefillFirstConfig()]
    policy, has_sharing = data.draw(st.sampled_from(policies)), data.draw(st.booleans())
    ahead = data.draw(st.integers(0, 1))
    sizes = Smaller(pages, shapes)
    check_served(drawn, sizes, policy, has_sharing=has_sharing, steps_ahead=ahead)


BUSY = [(True, 5, (8, 1.0, id_), id_, None, 0) for id_ in range(6)]


def test_preempted_requests_are_computed_again_without_a_change():
    found = check_served(BUSY, Smaller(7), SplitFuseConfig(budget=8), has_sharing=True)
    assert found.instance.num_preempted > 0


def test_shared_prefixes_change_no_token_and_compute_fewer():
    with_, without = (
        check_served(BUSY, Smaller(), SplitFuseConfig(budget=8), has_sharing=is_shared)
        for is_shared in (True, False)
    )
    assert with_.answers == without.answers
    assert with_.instance.num_computed < without.instance.num_computed
    assert with_.instance.num_cached > 0 == without.instance.num_cached


@dataclasses.dataclass(frozen=True)
class Swapping(SplitFuseConfig):
    """Moves a running sequence to host memory every third step."""

    def build(self, facts):
        inner, asked = SplitFuseConfig.build(self, facts), iter(range(10_000))

        def plan(view):
            found = inner(view)
            if next(asked) % 3 or found.evict or found.admit or found.restore or not view.running:
                return found
            victim = view.running[0].id
            return dataclasses.replace(
                found,
                singles=tuple(id_ for id_ in found.singles if id_ != victim),
                pieces=tuple(piece for piece in found.pieces if piece.id != victim),
                evict=(Eviction(victim, "swap"),),
            )

        return plan


def test_pages_return_from_host_memory_as_they_were():
    found = check_served(BUSY, Smaller(12), Swapping(budget=8), has_sharing=True)
    assert found.instance.num_preempted > 2


def test_a_fork_continues_with_a_copy_of_the_last_page():
    sampling = Sampling(max_tokens=6, temperature=1.0, seed=3)
    facts, policy = Smaller().facts(), SplitFuseConfig(budget=8)
    plan, instance = policy.build(facts), Instance(facts, policy.name)
    prompt, answers = (5, 4, 3, 2, 1), {0: [], 1: []}
    instance.submit(Request(id=0, prompt=prompt, sampling=sampling), 0.0)
    given, computed = {0: (prompt, sampling)}, 0
    while not instance.is_idle:
        if len(answers[0]) == 2 and 1 not in given:
            given[1] = ((*prompt, *answers[0]), dataclasses.replace(sampling, seed=8))
            request = Request(id=1, prompt=given[1][0], sampling=given[1][1])
            assert fork(instance, 0, request, 0.0) == () and instance.copies
            computed = instance.num_computed
        for step in instance.start(plan(instance.view(0.0)), 0.0):
            for event in instance.apply(step, executor().run(step), 0.0):
                if isinstance(event, Token):
                    answers[event.id].append(event.result.token)
    check_answers(given, answers)
    assert len(answers[1]) == 6 and answers[0][2:] != answers[1][:4]
    assert instance.num_computed - computed == 6 + 4, "the fork computes no token again"


def test_filters_draw_as_for_one_request_alone():
    filters = ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.7}, {})
    given = {
        id_: ((1, 2, 3), Sampling(max_tokens=5, temperature=1.5, seed=id_, **one))
        for id_, one in enumerate(filters)
    }
    check_answers(given, serve(given, dict.fromkeys(given, 0)).answers)


def test_log_probabilities_are_those_of_the_whole_pass():
    """Before temperature and filters."""
    sampling = Sampling(max_tokens=4, temperature=0.7, num_logprobs=2)
    steps = []

    def run(step):
        results = executor().run(step)
        steps.extend((work, results.get(work.id)) for work in step.works)
        return results

    given = {0: ((3, 1, 4, 1, 5, 9, 2, 6), sampling), 1: ((2, 7), Sampling(max_tokens=3))}
    found = serve(given, {0: 0, 1: 1}, run=run)
    logits = logits_of([[*given[0][0], *found.answers[0]]])[0]
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for work, result in steps:
        if work.id or result is None or not work.draws:
            continue
        own = logprobs[work.start + len(work.tokens) - 1]
        np.testing.assert_allclose(result.logprob, own[result.token], atol=1e-5)
        assert [token for token, _ in result.alternatives] == np.argsort(-own)[:2].tolist()
        np.testing.assert_allclose(
            [p for _, p in result.alternatives], np.sort(own)[:-3:-1], atol=1e-5
        )
        assert result.experts is None
    assert expected(logits[7], sampling, 0) == found.answers[0][0]
