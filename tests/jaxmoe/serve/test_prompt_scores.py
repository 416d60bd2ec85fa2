# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Scores of the tokens of prompts against one whole forward pass, whatever is served beside."""

import jax
import numpy as np
import pytest

from jaxmoe.models.transformer import forward
from jaxmoe.serve import Sampling
from jaxmoe.serve.engine import Engine
from tests.support.serving import MODEL, PLAIN, Smaller, check_answers, executor, params, serve

PROMPTS = {0: tuple(range(1, 15)), 1: (3,), 2: tuple(range(1, 12)), 3: tuple(range(1, 15))}


def _requests(number):
    """Requests of which every second asks for scores; beginnings are shared."""
    return {
        id_: (prompt, Sampling(max_tokens=8, num_prompt_logprobs=None if id_ % 2 else number))
        for id_, prompt in PROMPTS.items()
    }


@jax.jit
def _logprobs(params, tokens):
    return jax.nn.log_softmax(forward(MODEL, PLAIN, params, tokens).logits, axis=-1)


def _check(prompt, scores, number):
    # Not padded: with this model other sums change float32 logits by up to 5e-5, padding too.
    logprobs = np.asarray(_logprobs(params(), np.asarray([prompt], np.int32)))[0]
    assert len(scores) == len(prompt) - 1
    for place, score in enumerate(scores):
        row = logprobs[place]
        value = row[prompt[place + 1]]
        assert score.logprob == pytest.approx(float(value), abs=2e-5)
        assert score.rank == 1 + int((row > value).sum())
        order = np.argsort(-row)[:number].tolist()
        assert [token for token, _ in score.alternatives] == order
        assert [value for _, value in score.alternatives] == pytest.approx(
            row[order].tolist(), abs=2e-5
        )


@pytest.mark.parametrize("number", [0, 3])
def test_scores_are_those_of_a_whole_pass(number):
    """With pieces of prompts, also behind a request whose pages have the same beginning."""
    with Engine(executor()) as engine:
        streams = {
            id_: engine.submit(prompt, sampling)
            for id_, (prompt, sampling) in _requests(number).items()
        }
        events = {id_: list(stream) for id_, stream in streams.items()}
    for id_, (prompt, sampling) in _requests(number).items():
        first, *later = events[id_][:-1]
        assert all(event.prompt is None for event in later)
        if sampling.num_prompt_logprobs is None:
            assert first.prompt is None
        else:
            _check(prompt, first.prompt, number)


def test_scores_survive_preemptions_and_change_no_token():
    requests = _requests(2)
    served = serve(requests, {id_: id_ for id_ in requests}, sizes=Smaller(num_pages=8))
    assert served.instance.num_preempted
    check_answers(requests, served.answers)
    for id_, (prompt, sampling) in requests.items():
        if sampling.num_prompt_logprobs is not None:
            _check(prompt, served.scores[id_], 2)


def test_a_step_without_such_a_request_scores_nothing(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("scored")

    monkeypatch.setattr(executor(), "_score", refuse)
    requests = {0: (PROMPTS[0], Sampling(max_tokens=2))}
    assert len(serve(requests, {0: 0}).answers[0]) == 2
    with pytest.raises(AssertionError, match="scored"):
        serve({0: (PROMPTS[0], Sampling(num_prompt_logprobs=1))}, {0: 0})


def test_more_alternatives_than_are_compiled_are_refused():
    with (
        Engine(executor()) as engine,
        pytest.raises(ValueError, match="num_prompt_logprobs=4 exceeds the 3"),
    ):
        engine.submit((1, 2), Sampling(num_prompt_logprobs=4))
