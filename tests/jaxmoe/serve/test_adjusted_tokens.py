# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Penalties, biases and least lengths: against plain numpy, `transformers`, and each alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.generation.text_stream import TextStream
from jaxmoe.serve import Sampling
from jaxmoe.serve.device import draw
from jaxmoe.serve.step import Work
from tests.support.endpoint import Text
from tests.support.serving import VOCAB, Smaller, expected, logits_of, serve

PROMPTS = ((3, 5, 5, 7), (1, 2), (9, 3, 3, 11, 4, 9), (8,))


def _adjusted(logits, prompt, answer, sampling):
    """Return the logits of the next token as the fields are defined; slow and plain."""
    logits = logits.astype(np.float32).copy()
    for token, bias in sampling.logit_bias:
        logits[token] += np.float32(bias)
    if len(answer) < sampling.min_tokens:
        logits[list(sampling.stop_ids)] = -np.inf
    penalty = np.float32(sampling.repetition_penalty)
    for token in {*prompt, *answer}:
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(answer):
        logits[token] -= np.float32(sampling.frequency_penalty) * answer.count(token)
        logits[token] -= np.float32(sampling.presence_penalty)
    return logits


def _check(requests, answers):
    rows = logits_of([[*requests[id_][0], *answers[id_]] for id_ in answers])
    for row, (id_, answer) in zip(rows, answers.items(), strict=True):
        prompt, sampling = requests[id_]
        for index, token in enumerate(answer):
            before = answer[:index]
            logits = _adjusted(row[len(prompt) + index - 1], prompt, before, sampling)
            assert token == expected(logits, sampling, index), (id_, index)


CHANGES = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.75},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": ((4, 2.5), (6, -100.0), (23, 1.0))},
    "least length": {"min_tokens": 7, "stop_ids": (3, 4, 9, 11, 17)},
    "all": {
        "presence_penalty": -0.5,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": ((2, 1.0),),
        "min_tokens": 3,
        "stop_ids": (5, 2),
    },
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_tokens_are_drawn_from_the_changed_logits(changes, temperature):
    """Also under preemption, and other requests have the very tokens that they have alone."""
    base = {"temperature": temperature, "seed": 5, "max_tokens": 20}
    requests = {}
    for number, prompt in enumerate(PROMPTS):
        sampling = Sampling(**base, **(changes if number % 2 == 0 else {}))
        requests[number] = (prompt, sampling)
    arrivals = {number: number for number in requests}
    served = serve(requests, arrivals, sizes=Smaller(num_pages=9))
    assert served.instance.num_preempted
    _check(requests, served.answers)
    plain = {number: (prompt, Sampling(**base)) for number, (prompt, _) in requests.items()}
    alone = serve(plain, arrivals)
    assert [served.answers[number] == alone.answers[number] for number in (1, 3)] == [True] * 2
    assert any(served.answers[number] != alone.answers[number] for number in (0, 2))


def _changed(logits, sampling, history, num_prompt, drawn=(), source=-1):
    """Return the changed logits of a row whose history ends with `drawn[source]`, if that is."""
    index = len(history) - num_prompt
    adjustments = draw.no_adjustments(1, 16, VOCAB)
    work = Work(0, history[-1:], len(history) - 1, (), True, index, sampling, history=history)
    draw.set_adjustments(adjustments, 0, work, source=source)
    return draw.adjust_logits(jnp.asarray(logits), adjustments, jnp.asarray([*drawn, 0]))


@pytest.mark.slow
def test_changed_logits_are_those_of_transformers():
    """Repetition penalty, biases and least length of `transformers`, on the same logits."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    transformers = pytest.importorskip("transformers", reason="not installed: extra hf")
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = rng.normal(0, 3, (1, VOCAB)).astype(np.float32)
        history = tuple(rng.integers(0, VOCAB, 12).tolist())
        penalty, bias = float(rng.uniform(0.5, 2)), ((3, float(rng.normal())), (7, -2.0))
        sampling = Sampling(
            repetition_penalty=penalty, logit_bias=bias, min_tokens=9, stop_ids=(5, 6)
        )
        found = _changed(logits, sampling, history, 4)
        ids = torch.tensor([history])
        scores = torch.tensor(logits)
        for processor in (
            transformers.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias]),
            transformers.MinNewTokensLengthLogitsProcessor(4, 9, [5, 6], device="cpu"),
            transformers.RepetitionPenaltyLogitsProcessor(penalty),
        ):
            scores = processor(ids, scores)
        np.testing.assert_allclose(np.asarray(found), scores.numpy(), rtol=1e-6)


@pytest.mark.parametrize("num_prompt", [3, 4])
def test_a_token_that_the_step_before_draws_is_penalised_as_a_known_one(num_prompt):
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5)
    logits = np.linspace(-3, 3, VOCAB, dtype=np.float32)[None]
    known = _changed(logits, sampling, (3, 3, 5, 9, 7), num_prompt)
    pending = _changed(logits, sampling, (3, 3, 5, 9, -1), num_prompt, drawn=(2, 7, 4), source=1)
    other = _changed(logits, sampling, (3, 3, 5, 9, -1), num_prompt, drawn=(2, 7, 4), source=2)
    np.testing.assert_array_equal(known, pending)
    assert np.any(known != other)
    changed = _adjusted(
        logits[0], (3, 3, 5, 9)[:num_prompt], (3, 3, 5, 9, 7)[num_prompt:], sampling
    )
    np.testing.assert_allclose(known[0], changed, rtol=1e-6)


def test_a_step_without_changes_runs_no_further_program(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("drawn again")

    monkeypatch.setattr("jaxmoe.serve.device.executor.draw_adjusted", refuse)
    requests = {0: (PROMPTS[0], Sampling(max_tokens=3, min_tokens=2))}  # without stop ids
    assert len(serve(requests, {0: 0}).answers[0]) == 3
    changed = {0: (PROMPTS[0], Sampling(max_tokens=3, presence_penalty=1.0))}
    with pytest.raises(AssertionError, match="drawn again"):
        serve(changed, {0: 0})


def test_no_request_compiles_a_program():
    serve({0: (PROMPTS[0], Sampling(presence_penalty=1.0))}, {0: 0})
    size = draw.draw_adjusted._cache_size()
    for number, changes in enumerate(CHANGES.values()):
        serve({0: (PROMPTS[number % 4], Sampling(max_tokens=8, **changes))}, {0: 0})
    assert draw.draw_adjusted._cache_size() == size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty=2.5 must lie in"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan must lie in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0"),
        ({"min_tokens": 17}, "min_tokens=17 must be from 0 to max_tokens=16"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "give at most 300, each once"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_stop_strings_within_the_least_length_and_those_that_are_kept():
    def text(tokens, **options):
        stream = TextStream(Text(), ("cd", "z"), **options)
        parts = [stream.add(token) for token in tokens.encode()]
        return "".join([*parts, stream.finish()]), stream.is_stopped

    assert text("abcdecdf") == ("ab", True)
    assert text("abcdecdf", has_stop=True) == ("abcd", True)
    assert text("abcdecdf", min_tokens=4) == ("abcde", True)
    assert text("abcdecdf", min_tokens=3) == ("ab", True)  # the fourth letter completes it
    assert text("abcdecdf", min_tokens=8) == ("abcdecdf", False)
    assert text("abz", has_stop=True) == ("abz", True)


def test_changes_alone_decide_whether_logits_are_changed():
    assert not Sampling().changes_logits(0)
    held = Sampling(min_tokens=2, stop_ids=(1,))
    assert [held.changes_logits(index) for index in range(3)] == [True, True, False]
    assert dataclasses.replace(held, logit_bias=((1, 0.5),)).changes_logits(5)
