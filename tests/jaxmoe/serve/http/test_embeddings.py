# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings through OpenAI's client: hidden states of the last tokens of texts."""

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from jaxmoe.models.transformer import forward
from tests.support.endpoint import Speller, serving
from tests.support.serving import MODEL, PLAIN, executor, params

PROMPTS = ([3, 5, 5, 7, 11, 2], [4], list(range(1, 20)))


def _client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def _expected():
    """Return the last hidden states of whole passes over the prompts, padded behind."""
    tokens = np.zeros((len(PROMPTS), max(map(len, PROMPTS))), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    hidden = jax.jit(lambda values, ids: forward(MODEL, PLAIN, values, ids).hidden)
    states = np.asarray(hidden(params(), jnp.asarray(tokens)), np.float64)
    ends = [row[len(prompt) - 1] for row, prompt in zip(states, PROMPTS, strict=True)]
    return [end / np.linalg.norm(end) for end in ends]


def test_an_embedding_is_the_hidden_state_of_the_last_token():
    """Equal to a whole pass, also in pieces and where the begin of a prompt is in the pool."""
    with serving(executor()) as (address, _, _), _client(address) as client:
        expected = _expected()
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


def test_what_cannot_be_embedded_is_refused_by_its_field():
    speller = Speller()
    with serving(speller) as (address, _, _), _client(address) as client:
        for fields, message in (
            ({"input": []}, "input must be a text, token ids, or a list"),
            ({"input": ""}, "input has no token"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format='int8' must be float or"),
            ({"input": "a", "dimensions": 2}, "a vector has the width of the model"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.embeddings.create(**{"model": "speller"} | fields)
            assert message in caught.value.body["message"]
        speller.embeds = False
        with pytest.raises(openai.BadRequestError, match="gives no hidden states"):
            client.embeddings.create(model="speller", input="a")
