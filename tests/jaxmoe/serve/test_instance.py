# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""An instance under random arrivals, few pages, preemption, cancellation and failures."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxmoe.serve import BATCHING, End, Facts, Instance, Request, Result, Sampling, Shapes
from jaxmoe.serve.facts import youngest
from jaxmoe.serve.plan import Eviction, Plan, PromptPiece
from jaxmoe.serve.sequence import Sequence
from tests.support.page_executor import PageExecutor, Streams, answer, serve

quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

LENGTH = 24


def oldest(candidates):
    return min(candidates, key=lambda one: one.rank), "recompute"


def swapped(candidates):
    return youngest(candidates)[0], "swap"


def mixed(candidates):
    victim = youngest(candidates)[0]
    return victim, "swap" if victim.id % 2 else "recompute"


prompts = st.tuples(st.integers(0, 9), st.lists(st.integers(0, 3), min_size=1, max_size=12)).map(
    lambda pair: (*range(pair[0]), *pair[1])
)
requests_drawn = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.builds(
            lambda prompt, tokens, priority, salt: (prompt, tokens, priority, salt),
            prompts,
            st.integers(1, 9),
            st.integers(0, 1),
            st.sampled_from(["", "a"]),
        ),
    ),
    min_size=1,
    max_size=10,
)


def made(drawn):
    return [
        (
            time,
            Request(
                id=number,
                prompt=prompt,
                sampling=Sampling(
                    max_tokens=tokens,
                    stop_ids=(5,),
                    presence_penalty=1.0 if salt and number % 2 else 0.0,
                ),
                priority=priority,
                salt=salt,
            ),
        )
        for number, (time, (prompt, tokens, priority, salt)) in enumerate(drawn)
    ]


@quick
@given(
    drawn=requests_drawn,
    pages=st.integers(6, 24),
    victim=st.sampled_from([youngest, oldest, swapped, mixed]),
    name=st.sampled_from(["split_fuse", "prefill_first"]),
    shapes=st.sampled_from([None, Shapes(singles=4, pieces=((1, 5), (3, 2)))]),
    cancels=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=4),
    has_sharing=st.booleans(),
    steps_ahead=st.integers(0, 1),
    stop=st.sampled_from([None, 3]),
)
def test_every_answer_is_the_same_as_alone_and_every_stream_ends_once(
    drawn, pages, victim, name, shapes, cancels, has_sharing, steps_ahead, stop
):
    """Also where a step starts before the one before is known; `stop` ends an answer by its text,
    and some requests have penalties, behind whose steps nothing starts."""
    facts = Facts(
        num_pages=pages,
        page_size=4,
        max_running=4,
        max_length=LENGTH,
        victim=victim,
        shapes=shapes,
        steps_ahead=steps_ahead,
    )
    requests = made(drawn)
    instance = Instance(facts, name, has_sharing=has_sharing)
    policy = BATCHING[name](budget=9).build(facts)
    streams, _ = serve(
        instance,
        policy,
        requests,
        during=lambda time: (i for t, i in cancels if t == time),
        stop=lambda token: token.result.token == stop,
    )
    assert set(streams.ends) == {request.id for _, request in requests}
    for _, request in requests:
        expected, written = answer(request, LENGTH), streams.tokens.get(request.id, [])
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
        if streams.ends[request.id].reason == "cancelled":
            assert written == expected[: len(written)]
        else:
            assert written == expected
            is_last = len(request.prompt) + len(written) == LENGTH
            is_last = is_last or len(written) == request.sampling.max_tokens
            reason = "length" if written[-1] != 5 and is_last else "stop"
            assert streams.ends[request.id].reason == reason


def test_a_step_starts_before_the_one_before_is_known():
    """Its tokens are pending; one is thrown away where the answer has ended before it."""
    facts = small(steps_ahead=1)
    instance, policy, executor = begun(facts, range(3), tokens=9)
    steps = [step_of(instance, policy, executor, float(now)) for now in range(2)]
    assert [step.is_foreseen for step, _ in steps] == [True, True] and not instance.may_start
    assert [[work.tokens for work in step.works] for step, _ in steps] == [[(0, 1, 2)], [(-1,)]]
    (sequence,) = instance.queues.sequences.values()
    assert sequence.num_pending == 2 and sequence.computed == 4
    (token,) = instance.apply(*steps[0], 2.0)
    assert [*sequence.tokens] == [0, 1, 2, token.result.token, -1] and instance.may_start
    third, results = step_of(instance, policy, executor, 2.0)
    (end,) = instance.stop(0)
    assert end.reason == "stop" and sequence.num_written == 1
    assert instance.apply(*steps[1], 3.0) == instance.apply(third, results, 4.0) == ()
    assert instance.is_idle and instance.pool.num_free == facts.num_pages
    assert executor.drawn.keys() == {0}


def test_no_step_computes_beyond_the_last_token_of_an_answer():
    """The length of an answer is known before its tokens."""
    instance, policy, executor = begun(small(steps_ahead=1), range(3), tokens=2)
    first, second = (step_of(instance, policy, executor, float(now)) for now in range(2))
    assert [*instance.apply(*first, 2.0)] and instance.may_start
    assert not instance.next_steps(policy, 2.0)[1]
    assert [type(event) for event in instance.apply(*second, 3.0)][-1] is End
    assert instance.num_computed == 4


def test_a_step_starts_behind_one_whose_tokens_decide_how_the_next_are_drawn():
    """The executor is told of tokens with penalties as far as they are known."""
    facts = small(steps_ahead=1)
    instance, policy, executor = begun(facts, range(3), tokens=9)
    sampling = Sampling(max_tokens=9, frequency_penalty=1.0)
    step, results = step_of(instance, policy, executor)
    instance.submit(Request(id=1, prompt=(1, 2), sampling=sampling), 1.0)
    penal, drawn = step_of(instance, policy, executor, 1.0)
    assert penal.is_foreseen and [*penal.pieces[0].history] == [1, 2]
    instance.apply(step, results, 2.0)
    assert instance.may_start
    third, _ = step_of(instance, policy, executor, 2.0)
    works = {work.id: work for work in third.works}
    assert [(*work.tokens, *work.history) for work in works.values()] == [(-1,), (-1, 1, 2, -1)]
    instance.apply(penal, drawn, 3.0)
    fourth, _ = step_of(instance, policy, executor, 3.0)
    history = next(work.history for work in fourth.works if work.id == 1)
    assert [*history] == [1, 2, drawn[1].token, -1]


def test_pages_of_a_sequence_that_has_begun_anew_are_named_as_far_as_they_are_written():
    """It gave its pages back while a token was pending, and takes others before that is known."""
    facts = small(steps_ahead=1)
    instance, policy, executor = begun(facts, range(3), tokens=5)
    streams = Streams()

    def start(**plan):
        return [(step, executor.run(step)) for step in instance.start(Plan(**plan), 0.0)]

    streams.add(instance.apply(*step_of(instance, policy, executor), 1.0))
    (second,) = start(singles=(0,))
    assert not start(evict=(Eviction(0, "recompute"),))
    (third,) = start(admit=(0,), pieces=(PromptPiece(0, 2),))
    streams.add(instance.apply(*second, 2.0))
    assert not instance.pool.num_cached and not instance.queues.running[0].named
    streams.add(instance.apply(*third, 3.0))
    while not instance.is_idle:
        streams.add(instance.apply(*step_of(instance, policy, executor), 4.0))
        instance.check_pages()
    request = Request(id=0, prompt=(0, 1, 2), sampling=Sampling(max_tokens=5))
    assert streams.tokens[0] == answer(request, facts.max_length)


def small(**changes):
    sizes = {"num_pages": 8, "page_size": 4, "max_running": 4, "max_length": 32}
    return Facts(**{**sizes, **changes})


def begun(facts, *prompts, tokens=4, name="split_fuse", **options):
    """Return an instance with requests of some prompts, its policy and its executor."""
    instance = Instance(facts, name, **options)
    for number, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=tokens)
        instance.submit(Request(id=number, prompt=tuple(prompt), sampling=sampling), 0.0)
    return instance, BATCHING[name]().build(facts), PageExecutor(facts)


def step_of(instance, policy, executor, now=0.0):
    (step,) = instance.start(policy(instance.view(now)), now)
    return step, executor.run(step)


@pytest.mark.parametrize("shapes", [None, Shapes(singles=4, pieces=((1, 16), (2, 4)))])
@pytest.mark.parametrize(
    ("low", "high", "budget"),
    [((14, 18), (11, 18), 64), ((2, 28), (24, 4), 4)],
    ids=["both decode", "a prompt beside one that decodes"],
)
@pytest.mark.parametrize("victim", [youngest, swapped])
def test_the_sequence_of_the_lowest_priority_gives_its_pages_back(
    low, high, budget, shapes, victim
):
    """Although it runs longer, and the plan has work for it already."""
    facts = small(shapes=shapes, victim=victim)
    instance = Instance(facts, "split_fuse")
    policy = BATCHING["split_fuse"](budget=budget).build(facts)
    requests = [
        (
            time,
            Request(
                id=time,
                prompt=tuple(range(time * 5, time * 5 + prompt)),
                sampling=Sampling(max_tokens=tokens),
                priority=priority,
            ),
        )
        for time, ((prompt, tokens), priority) in enumerate(((low, -5), (high, 5)))
    ]
    streams, plans = serve(instance, policy, requests)
    assert {eviction.id for plan in plans for eviction in plan.evict} == {0}
    for _, request in requests:
        assert streams.tokens[request.id] == answer(request, facts.max_length)


def test_a_shared_prefix_is_computed_once():
    prompt = range(10)
    facts = small()
    instance, policy, _ = begun(facts)
    requests = [(0, Request(id=0, prompt=tuple(prompt))), (30, Request(id=1, prompt=tuple(prompt)))]
    serve(instance, policy, requests)
    assert instance.num_cached == 8
    assert instance.num_computed == 2 * (10 + 15) - 8


def test_a_prompt_that_is_cached_whole_computes_its_last_token():
    instance, policy, _ = begun(small())
    sampling = Sampling(max_tokens=1)
    requests = [
        (9 * number, Request(id=number, prompt=tuple(range(8)), sampling=sampling))
        for number in range(2)
    ]
    serve(instance, policy, requests)
    assert (instance.num_cached, instance.num_computed) == (4, 8 + 4)


@pytest.mark.parametrize("other", [{"salt": "b"}, {"adapter": "b"}])
def test_nothing_is_shared_between_tenants_or_adapters(other):
    instance, policy, _ = begun(small())
    prompt = tuple(range(10))
    serve(
        instance,
        policy,
        [(0, Request(id=0, prompt=prompt)), (30, Request(id=1, prompt=prompt, **other))],
    )
    assert instance.num_cached == 0


def test_a_preempted_sequence_keeps_its_tokens_and_finds_its_pages_again():
    facts = small(num_pages=4, max_length=16)
    prompts = [(1, 2, 3, 4, 5), (6, 7, 8, 9, 10)]
    instance, policy, _ = begun(facts)
    requests = [
        (0, Request(id=i, prompt=prompt, sampling=Sampling(max_tokens=10)))
        for i, prompt in enumerate(prompts)
    ]
    streams, _ = serve(instance, policy, requests)
    assert instance.num_preempted > 0
    assert [streams.tokens[i] for i in range(2)] == [answer(r, 16) for _, r in requests]


@pytest.mark.parametrize("when", range(6))
def test_a_request_cancelled_during_a_step_ends_after_it_and_frees_its_pages(when):
    instance, policy, executor = begun(small(), range(9), range(20, 25))
    streams = Streams()
    for time in range(when + 1):
        step, results = step_of(instance, policy, executor)
        if time == when:
            busy = {work.id for work in step.works}
            for id_ in range(2):
                ends = instance.cancel(id_)
                assert bool(ends) == (id_ not in busy and id_ not in streams.ends)
                streams.add(ends)
                assert instance.cancel(id_) == ()
        streams.add(instance.apply(step, results, 1.0))
        if instance.is_idle:
            break
    assert instance.is_idle and set(streams.ends) == {0, 1}
    instance.check_pages()
    assert instance.pool.num_free == 8


def test_a_failed_step_ends_every_stream_and_forgets_the_pages():
    instance, policy, executor = begun(small(), range(9), range(9), range(30), tokens=2)
    step, results = step_of(instance, policy, executor)
    instance.apply(step, results, 1.0)
    assert instance.start(policy(instance.view(1.0)), 1.0)
    ends = instance.fail("the device is gone")
    assert {(end.id, end.reason, end.message) for end in ends} == {
        (id_, "error", "the device is gone") for id_ in range(3)
    }
    assert instance.pool.num_free == 8 and instance.pool.num_cached == 0
    instance.submit(Request(id=9, prompt=tuple(range(9))), 2.0)
    step, _ = step_of(instance, policy, executor, 2.0)
    assert step.num_tokens == 9


def test_an_urgent_request_overtakes_the_queue():
    facts = small(max_running=1)
    instance, policy, executor = begun(facts, (1, 2), (3, 4))
    instance.submit(Request(id=7, prompt=(5, 6), priority=1), 0.0)
    step, _ = step_of(instance, policy, executor)
    assert [work.id for work in step.works] == [7]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(id=0, prompt=(1,)), "id=0 is already being served"),
        (Request(id=2, prompt=tuple(range(32))), "the prompt has 32 tokens; at most 31"),
        (Request(id=2, prompt=(1,)), "2 requests are waiting already"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(request_, message):
    instance, _, _ = begun(small(max_waiting=2), (1, 2), (3, 4))
    (end,) = instance.submit(request_, 0.0)
    assert isinstance(end, End) and end.reason == "refused" and message in end.message
    instance.check()


def test_a_pool_that_cannot_hold_one_sequence_is_refused():
    with pytest.raises(ValueError, match="max_length=32 tokens do not fit into 7 pages of 4"):
        Instance(small(num_pages=7))


def test_an_answer_ends_where_the_longest_sequence_ends():
    instance, policy, _ = begun(small(max_length=12))
    request = Request(id=0, prompt=tuple(range(9)), sampling=Sampling(max_tokens=100))
    streams, _ = serve(instance, policy, [(0, request)])
    assert len(streams.tokens[0]) == 3 and streams.ends[0].reason == "length"


def test_a_text_that_is_whole_is_stopped_from_outside():
    instance, policy, executor = begun(small(), (1, 2), (3, 4))
    step, results = step_of(instance, policy, executor)
    assert instance.stop(0) == ()  # a step computes it
    instance.apply(step, results, 1.0)
    assert instance.stop(0) == (End(0, "stop"),)
    assert instance.stop(0) == ()
    assert instance.queues.ended["stop"] == 1


def test_the_same_requests_give_the_same_plans():
    def plans():
        facts = small()
        policy = BATCHING["split_fuse"](budget=6).build(facts)
        requests = [(3 * i, Request(id=i, prompt=tuple(range(i, i + 7)))) for i in range(6)]
        return serve(Instance(facts), policy, requests)[1]

    assert plans() == plans()


def test_a_lost_sequence_is_noticed():
    instance, policy, executor = begun(small(), (1, 2), (3, 4))
    step, results = step_of(instance, policy, executor)
    instance.queues.submitted += 1
    with pytest.raises(AssertionError, match="3 submitted, but 0 waiting, 2 running"):
        instance.apply(step, results, 1.0)


def test_a_step_says_where_every_token_goes():
    instance, policy, executor = begun(small(), range(6), tokens=3)
    step, results = step_of(instance, policy, executor)
    (work,) = step.pieces
    assert (work.tokens, work.start, work.draws, work.index) == (tuple(range(6)), 0, True, 0)
    assert len(work.pages) == 2
    instance.apply(step, {0: Result(11)}, 1.0)
    step, _ = step_of(instance, policy, executor, 1.0)
    (work,) = step.singles
    assert (work.tokens, work.start, work.draws, work.index) == ((11,), 6, True, 1)


def _looks_at_the_queue(num_waiting, monkeypatch):
    """Return how often a step asks a sequence for its id, behind a queue of some length."""
    facts = Facts(num_pages=8, page_size=4, max_running=2, max_length=LENGTH, max_waiting=10_000)
    instance = Instance(facts)
    for number in range(num_waiting):
        instance.submit(Request(id=number, prompt=(1, 2), sampling=Sampling(max_tokens=4)), 0.0)
    policy = BATCHING["split_fuse"]().build(facts)
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "id", property(lambda one: asked.append(1) or one.request.id))
        _, (step,) = instance.next_steps(policy, 0.0)
        instance.apply(step, {work.id: Result(7) for work in step.works}, 1.0)
    assert len([*step.works]) == 2
    return len(asked)


def test_a_step_looks_at_no_more_of_a_long_queue(monkeypatch):
    assert _looks_at_the_queue(1000, monkeypatch) == _looks_at_the_queue(50, monkeypatch)
