# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that are echoed and scored, through OpenAI's client and the evaluation harness."""

import math

import jax
import numpy as np
import openai
import pytest

from tests.support.endpoint import serving
from tests.support.serving import LONGEST, executor, logits_of

PROMPT = [3, 5, 5, 7, 11, 2]
ASKED = {"model": "speller", "temperature": 0, "seed": 0}


@pytest.fixture(scope="module")
def address():
    with serving(executor()) as (found, _, _):
        yield found


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def _logprobs(ids):
    return np.asarray(jax.nn.log_softmax(logits_of([ids])[0], axis=-1))


def _expected(ids):
    rows = _logprobs(ids)
    return [float(rows[place][token]) for place, token in enumerate(ids[1:])]


def _text(ids):
    return bytes(ids).decode()


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_an_echo_has_the_scores_of_prompt_and_answer(client, max_tokens):
    answer = client.completions.create(
        **ASKED,
        prompt=PROMPT,
        max_tokens=max_tokens,
        echo=True,
        logprobs=2,
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    ids = PROMPT + choice.token_ids
    assert len(choice.token_ids) == max_tokens == answer.usage.completion_tokens
    assert choice.text == _text(ids) and choice.finish_reason == "length"
    logprobs = choice.logprobs
    assert logprobs.tokens == [_text([token]) for token in ids]
    assert logprobs.text_offset == list(range(len(ids)))
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(_expected(ids), abs=2e-5)
    for row, token, top in zip(_logprobs(ids), ids[1:], logprobs.top_logprobs[1:], strict=False):
        expected = [_text([one]) for one in np.argsort(-row)[:2]]
        assert list(top) == list(dict.fromkeys([*expected, _text([token])]))


def test_a_prompt_that_is_scored_alone_leaves_no_room_for_an_answer(client):
    ids = [token % 24 for token in range(LONGEST)]
    asked = ASKED | {"echo": True, "logprobs": 1}
    (choice,) = client.completions.create(**asked, prompt=ids, max_tokens=0).choices
    assert choice.finish_reason == "length" and choice.text == _text(ids)
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(_expected(ids), rel=1e-5, abs=2e-5)
    with pytest.raises(openai.BadRequestError, match="the prompt has 32 tokens"):
        client.completions.create(**asked, prompt=ids, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="the prompt has 33 tokens") as caught:
        client.completions.create(**asked, prompt=[*ids, 1], max_tokens=0)
    assert caught.value.param == "prompt"


def test_a_stream_echoes_the_prompt_once(client):
    asked = ASKED | {"prompt": [PROMPT, PROMPT[:3]], "max_tokens": 2, "echo": True, "logprobs": 1}
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True))
    for choice in whole.choices:
        own = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            values = [value for part in own for value in getattr(part.logprobs, name)]
            assert values == getattr(choice.logprobs, name)


def test_an_echo_without_scores_and_no_answer(client):
    (choice,) = client.completions.create(**ASKED, prompt=PROMPT, max_tokens=0, echo=True).choices
    assert choice.text == _text(PROMPT) and choice.logprobs is None
    (choice,) = client.completions.create(**ASKED, prompt=PROMPT, max_tokens=0).choices
    assert choice.text == "" and choice.finish_reason == "length"


@pytest.mark.parametrize("number", [0, 2])
def test_scores_of_a_prompt_are_written_as_vllm_writes_them(client, number):
    extra = {"prompt_logprobs": number}
    (choice,) = client.completions.create(
        **ASKED, prompt=PROMPT, max_tokens=1, extra_body=extra
    ).choices
    first, *scores = choice.prompt_logprobs
    assert first is None
    for token, row, score in zip(PROMPT[1:], _logprobs(PROMPT), scores, strict=False):
        found = score[str(token)]
        assert math.isclose(found["logprob"], row[token], abs_tol=2e-5)
        assert found["rank"] == 1 + int((row > row[token]).sum())
        assert found["decoded_token"] == _text([token])
        top = [str(other) for other in np.argsort(-row)[:number]]
        assert score.keys() == {str(token), *top}
        assert [score[name]["rank"] for name in top] == list(range(1, number + 1))
    whole = client.completions.create(
        **ASKED, prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, extra_body=extra
    ).choices[0]
    assert whole.prompt_logprobs == choice.prompt_logprobs
    tops = whole.logprobs.top_logprobs[1:]
    for token, row, top in zip(PROMPT[1:], _logprobs(PROMPT), tops, strict=False):
        assert len(top) == 1 + (token != np.argmax(row))


def test_more_alternatives_than_the_server_has_are_refused(client):
    for extra in ({"prompt_logprobs": 3}, {"prompt_logprobs": -1}):
        with pytest.raises(openai.BadRequestError, match="must be an integer from 0 to 2"):
            client.completions.create(**ASKED, prompt=PROMPT, extra_body=extra)


@pytest.mark.slow
def test_the_evaluation_harness_gets_the_numbers_of_a_whole_pass(address):
    """Its own client of completions, unchanged: sums of log-probabilities, and whether greedy."""
    models = pytest.importorskip(
        "lm_eval.models.openai_completions", reason="lm_eval is not installed: extra lm-eval"
    )
    client = models.LocalCompletionsAPI(
        base_url=f"{address}/v1/completions",
        model="speller",
        tokenizer_backend=None,
        tokenized_requests=True,
        num_concurrent=1,
        max_length=30,
    )
    client.tokenizer = "unused"  # the requests are token ids
    client.tokenized_requests = True
    greedy = int(np.argmax(_logprobs(PROMPT)[-1]))
    cases = [(PROMPT, [greedy]), (PROMPT[:2], [5, 7]), ([4], [8, 9, 1])]
    found = client._loglikelihood_tokens([(("", ""), *case) for case in cases])
    for (context, continuation), (total, is_greedy) in zip(cases, found, strict=True):
        ids = context + continuation
        expected = _expected(ids)[len(context) - 1 :]
        assert total == pytest.approx(sum(expected), abs=1e-4)
        rows = _logprobs(ids)[len(context) - 1 : -1]
        tops = [int(np.argmax(row)) for row in rows[: len(continuation)]]
        assert is_greedy == (tops == continuation)
