# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Several adapters of one model, served together: tokens of each alone, and of the folded model."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmoe.adapters import (
    AdaLoraConfig,
    LoraConfig,
    TargetsConfig,
    check_together,
    fold_adapters,
    together,
    with_base,
)
from jaxmoe.models.decode import generate
from jaxmoe.serve import Sampling
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine
from tests.support.serving import MODEL, SIZES, params

LORAS = {
    "sql": LoraConfig(rank=2, alpha=3.0, targets=TargetsConfig(roles=("attention_in",))),
    "chat": LoraConfig(
        rank=3, targets=TargetsConfig(roles=("attention_in", "mlp_out", "shared_in"))
    ),
}
PROMPTS = ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 11), (7,))
NAMES = ("", *LORAS)
GREEDY = Sampling(max_tokens=5, temperature=0.0)


def own(name):
    """The model with one adapter, and its parameters on the values of the base."""
    model = dataclasses.replace(MODEL, adapter=LORAS[name])
    return model, with_base(params(model), params())


@pytest.fixture(scope="module")
def engine():
    given = {name: (config, own(name)[1]) for name, config in LORAS.items()}
    adapter, whole = together(params(), given)
    model = dataclasses.replace(MODEL, adapter=adapter)
    executor = ModelExecutor(model, whole, config=SIZES, adapters=tuple(LORAS))
    with Engine(executor) as made:
        yield made


def answer(stream):
    return [event.token for event in stream if hasattr(event, "token")]


@pytest.mark.slow
def test_tokens_of_a_mixed_batch_are_those_of_each_adapter_alone_and_folded(engine):
    asked = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    streams = [engine.submit(prompt, GREEDY, adapter=name) for name, prompt in asked]
    mixed = [answer(stream) for stream in streams]
    alone = [answer(engine.submit(prompt, GREEDY, adapter=name)) for name, prompt in asked]
    assert mixed == alone
    found = dict(zip(asked, mixed, strict=True))
    for name in NAMES:
        values = fold_adapters(own(name)[1]) if name else params()
        given = {"num_tokens": GREEDY.max_tokens, "key": jax.random.key(0), "temperature": 0.0}
        wanted = generate(MODEL, values, [list(prompt) for prompt in PROMPTS], **given)
        np.testing.assert_array_equal([found[name, prompt] for prompt in PROMPTS], wanted)
    assert len({tuple(found[name, PROMPTS[0]]) for name in NAMES}) == 3
    with pytest.raises(ValueError, match="adapter='other' is not loaded: .* has sql, chat"):
        engine.submit((1,), GREEDY, adapter="other")


def test_members_have_the_products_of_their_own_factors():
    """Members differ in rank, and have none where an adapter leaves a matrix alone."""
    rng = np.random.default_rng(0)

    def factors(rank, scale):
        return {
            "w": np.zeros((2, 3, 4), np.float32),  # L, in, out
            "w:down": rng.normal(size=(2, 3, rank)).astype(np.float32),
            "w:up": rng.normal(size=(2, rank, 4)).astype(np.float32),
            "w:scale": np.array([scale, 0.0], np.float32),
        }

    givens = [factors(2, 0.5), factors(3, 2.0), {}]
    given = {str(i): (LORAS["sql"], {"a": own}) for i, own in enumerate(givens)}
    config, found = together({"a": {"w": np.zeros((2, 3, 4), np.float32)}}, given)
    assert (config.members, config.rank, config.task) == (3, 3, -1)
    downs, ups = found["a"]["w:downs"], found["a"]["w:ups"]
    assert downs.shape == (2, 3, 3, 3) and ups.shape == (2, 3, 3, 4)
    products = np.einsum("linr,lnro->nlio", downs, ups) * found["a"]["w:scale"][:, None, None]
    for own, product in zip(givens[:2], products, strict=False):
        wanted = own["w:scale"][:, None, None] * (own["w:down"] @ own["w:up"])
        np.testing.assert_allclose(product, wanted, rtol=1e-6, atol=1e-6)
    assert not products[2].any()


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (None, "a run without an adapter"),
        (AdaLoraConfig(), "adapter:adalora, and several .* all are adapter:lora"),
        (LoraConfig(targets=TargetsConfig(roles=("expert_in",))), "sql adapts expert_in"),
    ],
)
def test_adapters_that_cannot_stand_together_are_refused(adapter, message):
    with pytest.raises(ValueError, match=message):
        check_together("sql", adapter)
