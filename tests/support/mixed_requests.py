# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Drawn requests of all kinds to the model of `tests.support.serving`, and what they are told."""

import dataclasses
import random

import numpy as np

from jaxmoe.serve import Sampling
from jaxmoe.serve.answers import Generated
from tests.support.serving import VOCAB


@dataclasses.dataclass
class Climb:
    """A grammar: each token is at most `width` above the last, modulo V, and `count` of them end
    the answer; its matcher is one that has a last token."""

    width: int
    count: int
    last: int = 0
    failure: str = ""

    def start(self):
        """Return a matcher."""
        return dataclasses.replace(self)

    @property
    def is_done(self):
        """Whether the answer is whole."""
        return not self.count

    def mask(self):
        """Return the tokens that may follow, a bit each."""
        allowed = [(self.last + step) % VOCAB for step in range(1, self.width + 1)]
        return np.array([sum(1 << token for token in allowed)], np.uint32)

    def take(self, token):
        """Go on."""
        if not 1 <= (token - self.last) % VOCAB <= self.width:
            self.failure = f"{token} follows {self.last}"
        self.last = token
        self.count -= 1


KINDS = (
    {},
    {"temperature": 0.0},
    {"frequency_penalty": 0.8, "presence_penalty": -0.5},
    {"repetition_penalty": 1.6},
    {"logit_bias": ((3, 2.0), (7, -5.0))},
    {"stop_ids": (5, 11), "min_tokens": 3},
    {"num_logprobs": 2},
    {"num_prompt_logprobs": 1},
    {"pooling": "mean"},
    {"pooling": "last"},
    {"has_experts": True},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
)


def mixed_requests(count: int) -> list[tuple[tuple[int, ...], Sampling]]:
    """Return prompts, of which many begin alike, and how they are answered."""
    rng = random.Random(0)
    begins = [tuple(rng.choices(range(VOCAB), k=12)) for _ in range(4)]
    requests = []
    for number in range(count):
        prompt = rng.choice(begins)[: rng.randrange(13)]
        prompt += tuple(rng.choices(range(VOCAB), k=rng.randint(1, 5)))
        fields = {"temperature": 0.9, **KINDS[number % len(KINDS)]}
        if number % 3 == 0:
            fields["grammar"] = Climb(rng.randint(2, 9), rng.randint(4, 12))
        sampling = Sampling(max_tokens=rng.randint(4, 12), seed=number, **fields)
        requests.append((prompt, sampling))
    return requests


def told(stream):
    """Return the tokens of an answer, why it ended, and the numbers beside it."""
    *generated, ended = stream
    assert all(isinstance(event, Generated) for event in generated), ended
    first = generated[0]
    numbers = [event.logprob for event in generated]
    numbers += [value for event in generated for _, value in event.alternatives]
    numbers += [score.logprob for score in first.prompt or ()]
    numbers += [] if first.embedding is None else first.embedding.tolist()
    return [event.token for event in generated], ended.reason, numbers


def check_told(answers, alone):
    """Assert that tokens and ends are equal, and numbers beside them up to rounding."""
    for number, (answer, other) in enumerate(zip(answers, alone, strict=True)):
        assert answer[:2] == other[:2], number
        np.testing.assert_allclose(answer[2], other[2], atol=1e-4, err_msg=str(number))
