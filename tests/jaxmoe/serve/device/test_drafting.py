# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Steps that check guesses: the answers without them, whatever is guessed, in fewer steps."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxmoe.serve import Sampling
from jaxmoe.serve.answers import whole_experts
from jaxmoe.serve.device import executor as executor_module
from jaxmoe.serve.device.drafting import GuessedTokens, ServedDrafter
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.policies.batching import PrefillFirstConfig, SplitFuseConfig
from tests.jaxmoe.serve.test_served_tokens import Swapping
from tests.support.serving import MODEL, SIZES, VOCAB, Smaller, executor, params, serve

DEPTH = 2


class Oracle(ServedDrafter):
    """Knows what each request is answered, and is wrong at some places."""

    depth = DEPTH
    texts: dict[int, list[int]]
    """Prompt and answer of each request."""
    wrong = 0
    """Every how many tokens it is wrong; 0 for never."""

    def initial_pools(self, *, pages, size):
        return {}

    def guess(self, params, router_state, pools, step):
        guesses = np.zeros((SIZES.shapes.most_rows, DEPTH), np.int32)
        for row, computed in enumerate(step.works):
            known = [*computed.work.history, *computed.drawn]
            text = self.texts[computed.work.id]
            if computed.drawn:
                assert text[: len(known)] == known[: len(text)]  # it may go on behind an end
                assert len(known) == computed.end + 1
            for k in range(DEPTH):
                place = len(known) + k
                guess = text[place] if place < len(text) else 0
                is_wrong = self.wrong and place % self.wrong == 0
                guesses[row, k] = (guess + 1) % VOCAB if is_wrong else guess
        return guesses, pools


ORACLE = Oracle()


@functools.cache
def drafting() -> ModelExecutor:
    """Return an executor of the session's model whose guesses are those of the oracle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            executor_module,
            "guesses_of",
            lambda model, execution, config, adapters: GuessedTokens(ORACLE, config),
        )
        return ModelExecutor(MODEL, params(), config=SIZES)


def served(requests, *, wrong=0, policy=None, has_sharing=True, pages=SIZES.num_pages, **texts):
    """Return what was served with and without guesses, and the steps of each."""
    arrivals = {number: number for number in requests}
    options = {"policy": policy, "has_sharing": has_sharing}
    steps = {False: [], True: []}
    plain = serve(
        requests,
        arrivals,
        sizes=Smaller(pages),
        run=lambda step: steps[False].append(step) or Smaller().run(step),
        steps_ahead=0,
        **options,
    )
    ORACLE.wrong = wrong
    ORACLE.texts = {
        number: [*prompt, *plain.answers[number]] for number, (prompt, _) in requests.items()
    }
    drafted = serve(
        requests,
        arrivals,
        sizes=Smaller(pages, executor=drafting),
        run=lambda step: steps[True].append(step) or drafting().run(step),
        steps_ahead=0,
        **options,
    )
    assert drafted.answers == plain.answers
    assert drafted.reasons == plain.reasons
    return plain, drafted, len(steps[False]), len(steps[True])


def mixed(**options):
    """Return greedy and sampled requests that begin alike, more than run together."""
    rng = np.random.default_rng(1)
    common = rng.integers(0, VOCAB, 9).tolist()
    return {
        number: (
            (*(common if number % 2 else ()), *rng.integers(0, VOCAB, 3 + number).tolist()),
            Sampling(max_tokens=8 + number, temperature=temperature, seed=number, **options),
        )
        for number, temperature in enumerate((0.0, 0.7, 1.3, 0.0, 1.0, 0.9))
    }


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_answers_are_those_without_guesses(wrong):
    plain, drafted, num_plain, num_drafted = served(mixed(), wrong=wrong)
    instance = drafted.instance
    assert instance.num_guessed > 0 and plain.instance.num_guessed == 0
    assert drafted.instance.num_cached > 0  # pages are shared
    if wrong == 1:  # all are
        assert instance.num_accepted == 0 and num_drafted == num_plain
    elif wrong:
        assert 0 < instance.num_accepted < instance.num_guessed and num_drafted < num_plain
    else:
        assert instance.num_accepted == instance.num_guessed and num_drafted < num_plain
    computed = drafted.instance.num_computed
    assert computed == plain.instance.num_computed  # a token that was wrong is not one of them


@pytest.mark.parametrize(
    "policy", [SplitFuseConfig(budget=8), PrefillFirstConfig(), Swapping(budget=8)]
)
@pytest.mark.parametrize("wrong", [0, 3])
def test_answers_are_those_without_guesses_when_pages_are_lacking(policy, wrong):
    """Preempted requests are computed again, or return from host memory."""
    pages = 12 if isinstance(policy, Swapping) else 9
    for has_sharing in (True, False):
        _, drafted, _, _ = served(
            mixed(), wrong=wrong, policy=policy, has_sharing=has_sharing, pages=pages
        )
        assert drafted.instance.num_preempted > 0
        assert drafted.instance.num_accepted > 0


def test_right_guesses_take_as_few_steps_as_pages_have_room_for():
    """No guess goes beyond the last page: 4 positions of a page hold 3 + 1 tokens."""
    requests = {0: ((1, 2, 3), Sampling(max_tokens=26, temperature=1.0))}
    _, drafted, num_plain, num_drafted = served(requests)
    assert num_plain == 26  # 25 behind the one that the prompt gives, from place 3 of page 0
    assert num_drafted == 1 + 1 + 2 * 6  # 1 at place 3; 3 + 1 tokens of 6 pages in 2 steps each
    assert drafted.instance.num_accepted == 25 - 13


def test_answers_end_in_the_middle_of_accepted_guesses():
    requests = mixed()
    plain, *_ = served(requests)

    def changed(**fields):
        return {
            number: (
                prompt,
                dataclasses.replace(
                    sampling, **{name: value(number) for name, value in fields.items()}
                ),
            )
            for number, (prompt, sampling) in requests.items()
        }

    for cut in (2, 3, 4):
        ends = changed(stop_ids=lambda number, cut=cut: (plain.answers[number][cut],))
        _, drafted, _, _ = served(ends)
        assert set(drafted.reasons.values()) == {"stop"}
        shorter = changed(max_tokens=lambda number, cut=cut: cut)
        _, drafted, _, _ = served(shorter)
        assert {len(answer) for answer in drafted.answers.values()} == {cut}


class Even:
    """Grammar of some even tokens."""

    failure = ""

    def __init__(self, count=0):
        self.count = count

    def start(self):
        return Even()

    def mask(self):
        return np.full(-(-VOCAB // 32), 0x55555555, np.uint32)

    def take(self, token):
        assert token % 2 == 0
        self.count += 1

    @property
    def is_done(self):
        return self.count == 5


def test_requests_whose_logits_depend_on_their_tokens_are_not_guessed():
    """They share steps with others; behind a least length there are guesses."""
    changed = {
        0: {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        1: {"logit_bias": ((4, 2.5),)},
        2: {"grammar": Even()},
        3: {"min_tokens": 5, "stop_ids": (3, 4)},
    }
    requests = {
        number: (prompt, dataclasses.replace(sampling, **changed.get(number, {})))
        for number, (prompt, sampling) in mixed().items()
    }
    _, drafted, num_plain, num_drafted = served(requests)
    assert drafted.instance.num_accepted > 0 and num_drafted < num_plain
    assert len(drafted.answers[2]) == 5 and drafted.reasons[2] == "stop"
    alone = {number: requests[number] for number in (0, 1, 2)}
    _, drafted, num_plain, num_drafted = served(alone)
    assert drafted.instance.num_guessed == 0 and num_plain == num_drafted
    assert served({0: requests[3]})[1].instance.num_accepted > 0


def test_events_of_accepted_guesses_have_all_that_was_asked_for():
    """Log-probabilities, alternatives and experts; the numbers of an engine count guesses."""
    sampling = Sampling(max_tokens=9, temperature=0.8, has_experts=True, num_logprobs=3, seed=4)
    prompt = (5, 4, 3, 2, 1, 6)
    events = {}
    for make in (executor, drafting):
        with Engine(make()) as engine:
            answer = [*engine.submit(prompt, sampling)]
            events[make] = answer[:-1]
            ORACLE.texts = {0: [*prompt, *(event.token for event in answer[:-1])]}
            ORACLE.wrong = 3
        metrics = engine.metrics  # those of the last step are known when the engine has ended
    plain, drafted = events.values()
    assert [event.token for event in drafted] == [event.token for event in plain]
    assert [event.index for event in drafted] == [*range(9)]
    np.testing.assert_array_equal(whole_experts(drafted), whole_experts(plain))
    for left, right in zip(drafted, plain, strict=True):
        np.testing.assert_allclose(left.logprob, right.logprob, rtol=1e-4, atol=1e-5)
        assert [id_ for id_, _ in left.alternatives] == [id_ for id_, _ in right.alternatives]
    assert 0 < metrics.drafts_accepted < metrics.drafts_checked
    assert metrics.tokens_generated == 9
    assert metrics.num_steps == 2 + 8 - metrics.drafts_accepted  # two pieces of the prompt
