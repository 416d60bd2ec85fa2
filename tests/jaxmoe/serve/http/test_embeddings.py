# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings through OpenAI's client: hidden states of the tokens of texts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from jaxmoe.models.transformer import forward
from jaxmoe.serve import Request, Result, Sampling
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.sequence import Sequence
from tests.support.endpoint import Speller, serving
from tests.support.serving import LONGEST, MODEL, PLAIN, Smaller, executor, params

PROMPTS = ([3, 5, 5, 7, 11, 2], [4], list(range(1, 20)))


def _client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@functools.cache
def _states():
    """Return the hidden states of whole passes over the prompts, padded behind."""
    tokens = np.zeros((len(PROMPTS), max(map(len, PROMPTS))), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    hidden = jax.jit(lambda values, ids: forward(MODEL, PLAIN, values, ids).hidden)
    states = np.asarray(hidden(params(), jnp.asarray(tokens)), np.float64)
    return [row[: len(prompt)] for row, prompt in zip(states, PROMPTS, strict=True)]


def _expected(pooling="last", is_normalized=True):
    """Return the embeddings of the prompts."""
    vectors = [state[-1] if pooling == "last" else state.mean(axis=0) for state in _states()]
    return [vector / (np.linalg.norm(vector) if is_normalized else 1) for vector in vectors]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_the_last_hidden_state_or_the_mean_of_all(pooling):
    """Equal to a whole pass, also in pieces and where the begin of a prompt is in the pool."""
    with (
        serving(executor(), pooling_type=pooling) as (address, _, _),
        _client(address) as client,
    ):
        expected = _expected(pooling)
        for _ in range(2):
            answer = client.embeddings.create(model="speller", input=list(PROMPTS))
            assert [item.index for item in answer.data] == [0, 1, 2]
            assert answer.usage.total_tokens == sum(map(len, PROMPTS))
            for state, item in zip(expected, answer.data, strict=True):
                np.testing.assert_allclose(item.embedding, state, atol=2e-5)
        plain = client.embeddings.create(
            model="speller", input=PROMPTS[0], encoding_format="float"
        ).data[0]
        np.testing.assert_allclose(plain.embedding, expected[0], atol=2e-5)
        for other in ("last", "mean"):
            for is_normalized in (False, True):
                fields = {"pooling_type": other.upper(), "normalize": is_normalized}
                answer = client.embeddings.create(
                    model="speller", input=list(PROMPTS), extra_body=fields
                )
                for state, item in zip(_expected(other, is_normalized), answer.data, strict=True):
                    np.testing.assert_allclose(item.embedding, state, atol=5e-5)
        # Answers take the pages of the prompts.
        usage = client.completions.create(model="speller", prompt=PROMPTS[2], max_tokens=1).usage
        assert usage.prompt_tokens_details.cached_tokens == 16


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_text_may_have_all_tokens_of_a_sequence(pooling):
    """No answer is written, so that it leaves no room for one; also where it fills the pool."""
    prompt = tuple(token % 24 for token in range(7, 7 + LONGEST))
    tokens = jnp.asarray([prompt], jnp.int32)
    states = np.asarray(forward(MODEL, PLAIN, params(), tokens).hidden[0], np.float64)
    expected = states[-1] if pooling == "last" else states.mean(axis=0)
    embedded = Sampling(max_tokens=1, pooling=pooling, has_answer=False)
    other = ((1, 2, 3), Sampling(max_tokens=9))
    with Engine(Smaller(num_pages=LONGEST // 4)) as engine:
        requests = [other, (prompt, embedded), other, (prompt, embedded)]
        with engine.held():
            streams = [engine.submit(*request) for request in requests]
        events = [list(stream) for stream in streams]
    assert [ends.reason for *_, ends in events] == ["length"] * 4
    for first, *_ in events[1::2]:
        np.testing.assert_allclose(first.embedding, expected, atol=2e-4)
    with pytest.raises(ValueError, match="max_tokens=2 must be 1 where has_answer=False"):
        Sampling(max_tokens=2, has_answer=False)
    with serving(executor()) as (address, _, _), _client(address) as client:
        assert client.embeddings.create(model="speller", input=list(prompt)).data
        with pytest.raises(openai.BadRequestError, match="the prompt has 33 tokens") as caught:
            client.embeddings.create(model="speller", input=[*prompt, 1])
        assert caught.value.param == "input"
        assert caught.value.code == "context_length_exceeded"


def test_a_mean_is_bitwise_as_alone_among_others_in_other_pieces_and_preempted():
    """Whatever the pieces of a prompt are, and what of it is in the pool."""
    prompts = [tuple(range(1, 1 + number)) for number in (19, 12, 7, 3)]
    mean = Sampling(max_tokens=12, pooling="mean")
    others = [((*prompt, *prompt)[:20], Sampling(max_tokens=9, seed=1)) for prompt in prompts]
    requests = [*others[:2], *((prompt, mean) for prompt in prompts), *others[2:]]
    with Engine(Smaller()) as engine:
        alone = [next(iter(engine.submit(prompt, mean))).embedding for prompt in prompts]
    for pages in (9, 32):
        with Engine(Smaller(num_pages=pages)) as engine:
            with engine.held():
                streams = [engine.submit(*request) for request in requests]
            values = [next(iter(stream)).embedding for stream in streams[2:6]]
            assert engine.drain(60)
        for one, other in zip(alone, values, strict=True):
            np.testing.assert_array_equal(one, other)
        assert engine.metrics.num_preempted or pages > 9


@pytest.mark.parametrize("start", [0, 3])
def test_states_that_are_computed_again_are_counted_once(start):
    """A preempted prompt begins anew at its first token, or goes on where its pages are swapped."""
    states = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    request = Request(id=0, prompt=range(7), sampling=Sampling(pooling="mean"))
    sequence = Sequence(request=request, order=0, arrived=0.0, page_size=4, tokens=range(7))
    sequence.note_prompt(0, Result(-1, states=states[:3]))
    sequence.note_prompt(start, Result(5, states=states[start:]))
    mean = sequence.with_prompt(Result(5)).embedding
    np.testing.assert_allclose(mean, states.mean(axis=0), rtol=1e-6)
    assert sequence.prefix_names() == []


def test_what_cannot_be_embedded_is_refused_by_its_field():
    speller = Speller()
    with serving(speller) as (address, _, _), _client(address) as client:
        for fields, message in (
            ({"input": []}, "input must be a text, token ids, or a list"),
            ({"input": ""}, "input has no token"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format='int8' must be float or"),
            ({"input": "a", "extra_body": {"pooling_type": "cls"}}, "must be last or mean"),
            ({"input": "a", "dimensions": 2}, "a vector has the width of the model"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.embeddings.create(**{"model": "speller"} | fields)
            assert message in caught.value.body["message"]
        speller.embeds = False
        with pytest.raises(openai.BadRequestError, match="gives no hidden states"):
            client.embeddings.create(model="speller", input="a")
