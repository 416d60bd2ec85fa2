# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Requests that a masked-diffusion model fills in, rows at different steps: each as if alone."""

import dataclasses
import json
import math
import re

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.diffusion.config import DiffusionConfig, DiffusionSizes
from jaxmoe.contrib.diffusion.executor import DiffusionExecutor, why_not_filled
from jaxmoe.contrib.fleet.engine import FleetEngine
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import MoEConfig
from jaxmoe.routing import CapacityConfig
from jaxmoe.serve import Request, Sampling
from jaxmoe.serve.answers import Ended
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine, EngineConfig
from sharding.mesh import MeshConfig
from tests.support.diffusion import CHOICE, LONGEST, MIXED, POINTWISE, SIZES, VOCAB, alone, executor
from tests.support.endpoint import Text, serving
from tests.support.serving import MODEL, Smaller
from tests.support.texts import Letters

RATES = (0.5, 1.0, 2.0)
CAPPED = MoEConfig(num_experts=4, top_k=2, expert_dim=8, capacity=CapacityConfig())


def steps_of(sampling, prompt, rate):
    return math.ceil(rate * min(sampling.max_tokens, LONGEST - len(prompt)))


def read(stream):
    """The tokens, the text and the last event of a stream."""
    *generated, ended = stream
    assert isinstance(ended, Ended)
    assert [one.index for one in generated] == list(range(len(generated)))
    text = "".join(one.text for one in generated) + ended.text
    return [one.token for one in generated], text, ended


def serve(model, asked, arrivals, cancels, rate):
    """What an instance answers to requests that arrive and are cancelled at certain steps."""
    config = DiffusionConfig(steps_per_token=rate)
    facts = executor(model).facts(max_waiting=99)
    instance, plan = config.instance(facts), config.policy(facts)
    answers, reasons = {id_: [] for id_ in asked}, {}

    def note(events):
        for event in events:
            assert event.id not in reasons
            if hasattr(event, "result"):
                assert event.index == len(answers[event.id]) and event.result.logprob < 0.0
                answers[event.id].append(event.result.token)
            else:
                reasons[event.id] = event.reason

    now = 0
    while now <= max(arrivals.values()) or not instance.is_idle:
        for id_, (prompt, sampling) in asked.items():
            if arrivals[id_] == now:
                note(instance.submit(Request(id=id_, prompt=prompt, sampling=sampling), now))
            if cancels.get(id_) == now:
                note(instance.cancel(id_))
        for step in instance.start(plan(instance.view(now)), now):
            if now % 2:  # also while the step runs
                note(instance.cancel(next((i for i, at in cancels.items() if at == now), -1)))
            note(instance.apply(step, executor(model).run(step), now))
        instance.check_pages()
        now += 1
        assert now < 500
    assert instance.pool.num_free == SIZES.rows and set(reasons) == set(asked)
    return answers, reasons


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=5),
        st.booleans(),  # a row of 8 tokens, or of 6
        st.integers(0, 3),  # seed
        st.sampled_from([0.0, 0.7, 1.0]),
        st.sampled_from([0, 0, 5]),  # top_k
        st.integers(0, 6),  # arrival
        st.sampled_from([None, None, 1, 3, 6]),  # cancellation
    ),
    min_size=1,
    max_size=6,
)


def check_requests(model, drawn, rate):
    asked, arrivals, cancels = {}, {}, {}
    for id_, (prompt, is_long, seed, temperature, top_k, arrival, cancel) in enumerate(drawn):
        count = (LONGEST if is_long else 6) - len(prompt)
        sampling = Sampling(max_tokens=count, seed=seed, temperature=temperature, top_k=top_k)
        asked[id_], arrivals[id_] = (tuple(prompt), sampling), arrival
        if cancel is not None:
            cancels[id_] = arrival + cancel
    answers, reasons = serve(model, asked, arrivals, cancels, rate)
    for id_, (prompt, sampling) in asked.items():
        wanted = alone(model, prompt, sampling, steps_of(sampling, prompt, rate))
        assert answers[id_] == wanted[: len(answers[id_])]
        assert reasons[id_] == ("length" if len(answers[id_]) == len(wanted) else "cancelled")
        assert id_ in cancels or reasons[id_] == "length"


@settings(max_examples=8, deadline=None)
@given(REQUESTS, st.sampled_from(RATES))
def test_each_request_gets_the_tokens_of_diffuse_alone(drawn, rate):
    check_requests(POINTWISE, drawn, rate)


@pytest.mark.slow
@pytest.mark.parametrize("model", [POINTWISE, CHOICE, MIXED], ids=["pointwise", "choice", "mixed"])
def test_each_request_gets_the_tokens_of_diffuse_alone_large(model):
    @settings(max_examples=40, deadline=None)
    @given(REQUESTS, st.sampled_from(RATES))
    def check(drawn, rate):
        check_requests(model, drawn, rate)

    check()


def test_experts_that_choose_in_padded_rows_give_the_tokens_of_diffuse_alone():
    drawn = [([1, 2, 3], False, i, 1.0, 0, i, None) for i in range(4)]
    check_requests(CHOICE, drawn, 1.0)


def test_streams_of_an_engine_end_at_stops_and_count():
    prompt, asked = (1, 2, 3), Sampling(max_tokens=5, seed=2)
    wanted = alone(POINTWISE, prompt, asked, 5)
    text = Letters().decode(wanted)
    with Engine(executor(), DiffusionConfig(), codec=Letters()) as engine:
        streams = [engine.submit(prompt, asked) for _ in range(4)]
        assert [read(stream)[:2] for stream in streams] == [(wanted, text)] * 4
        at = text.index(text[2])
        tokens, shorter, ended = read(engine.submit(prompt, asked, stop=(text[2],)))
        assert ended.reason == "stop" and shorter == text[:at] and tokens == wanted[: at + 1]
        ids = dataclasses.replace(asked, stop_ids=(wanted[1],))
        tokens, shorter, ended = read(engine.submit(prompt, ids))
        first = wanted.index(wanted[1])
        assert ended.reason == "stop" and tokens == wanted[: first + 1] and shorter == text[:first]
        # As long as the row holds; several answers have the seeds s, s + 1, ...
        most = dataclasses.replace(asked, max_tokens=99)
        assert read(engine.submit(prompt, most))[0] == wanted
        several = [read(one)[0] for one in engine.submit_samples(prompt, asked, 2)]
        other = dataclasses.replace(asked, seed=3)
        assert several == [wanted, alone(POINTWISE, prompt, other, 5)]
        gone = engine.submit(prompt, asked)
        gone.cancel()
        assert read(gone)[2].reason in ("cancelled", "length")
        refused = read(engine.submit((1,) * LONGEST, asked))[2]
        assert refused.reason == "refused" and "shorten the prompt" in refused.message
        assert engine.drain(timeout=60)
        metrics, load = engine.metrics, engine.expert_load
    assert metrics.pages_used == 0 and metrics.pages_total == SIZES.rows
    assert metrics.num_submitted == sum(metrics.num_ended.values()) == 11
    # A stop string in the last tokens is seen by the stream alone.
    assert metrics.num_ended["stop"] in (1, 2) and metrics.num_ended["refused"] == 1
    assert load.shape == (1, 4) and metrics.tokens_generated >= 7 * 5


def test_the_endpoint_completes_and_streams_what_rows_are_filled_with():
    asked = {"prompt": [1, 2, 3], "max_tokens": 5, "seed": 2, "logprobs": 0}
    wanted = alone(POINTWISE, (1, 2, 3), Sampling(max_tokens=5, seed=2), 5)
    with serving(executor(), DiffusionConfig()) as (address, _, _):
        found = httpx.post(f"{address}/v1/completions", json=asked).json()
        (choice,) = found["choices"]
        assert choice["text"] == Text().decode(wanted) and choice["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] == 5
        assert all(value < 0.0 for value in choice["logprobs"]["token_logprobs"])
        parts = httpx.post(f"{address}/v1/completions", json=asked | {"stream": True}).text
        events = [one.removeprefix("data: ") for one in parts.split("\n\n") if one]
        assert events[-1] == "[DONE]"
        texts = [json.loads(one)["choices"][0]["text"] for one in events[:-1]]
        assert "".join(texts) == choice["text"]
        refused = httpx.post(f"{address}/v1/completions", json=asked | {"logprobs": 1})
        assert refused.status_code == 400 and "of each token alone" in refused.text
        long = httpx.post(f"{address}/v1/completions", json=asked | {"max_tokens": 6})
        assert long.json()["choices"][0]["text"] == choice["text"]  # clipped to the room of 5
        full = httpx.post(f"{address}/v1/completions", json=asked | {"prompt": [1] * 8})
        assert full.status_code == 400 and "this server holds 8 tokens" in full.text
        for field in ({"presence_penalty": 1}, {"prompt_logprobs": 0}, {"logit_bias": {"1": 1}}):
            other = httpx.post(f"{address}/v1/completions", json=asked | field)
            assert other.status_code == 400 and "masked-diffusion" in other.text
        assert httpx.get(f"{address}/v1/models").json()["data"][0]["max_model_len"] == LONGEST
        assert "jaxmoe_pages 3.0" in re.sub(r"{.*?}", "", httpx.get(f"{address}/metrics").text)


def test_two_instances_answer_as_one():
    prompt, asked = (4, 5), Sampling(max_tokens=4, temperature=0.0)
    with FleetEngine([executor(), executor()], DiffusionConfig()) as engine:
        found = [read(one)[0] for one in [engine.submit(prompt, asked) for _ in range(8)]]
        assert all(one.num_ended["length"] for one in engine.instance_metrics)
    assert found == [alone(POINTWISE, prompt, asked, 4)] * 8


def test_a_failed_step_ends_all_streams_and_rows_are_free():
    class Failing(DiffusionExecutor):
        """Fails in its second step."""

        steps = 0

        def __init__(self):
            self.__dict__.update(vars(executor()))

        def run(self, step):
            self.steps += 1
            if self.steps == 2:
                raise RuntimeError("device lost")
            return super().run(step)

    asked = Sampling(max_tokens=5)
    with Engine(Failing(), DiffusionConfig()) as engine:
        with engine.held():
            streams = [engine.submit((1, 2, 3), asked) for _ in range(4)]
        ends = [read(stream)[2] for stream in streams]
        assert {end.reason for end in ends} == {"error"}
        assert all("RuntimeError: device lost" in end.message for end in ends)
        tokens, _, ended = read(engine.submit((1, 2, 3), asked))
        assert ended.reason == "length" and tokens == alone(POINTWISE, (1, 2, 3), asked, 5)
        assert engine.metrics.pages_used == 0 and engine.metrics.num_ended["error"] == 4


def test_what_diffusion_does_not_have_is_refused_in_words():
    def refused(text, **asked):
        prompt = asked.pop("prompt", (1,))
        adapter = asked.pop("adapter", "")
        request = Request(id=0, prompt=prompt, sampling=Sampling(**asked), adapter=adapter)
        with pytest.raises(ValueError, match=text):
            executor().check(request)

    refused("the model has ids 0 to 27", prompt=(1, VOCAB - 1))
    refused("num_logprobs=2", num_logprobs=2)
    refused("has_experts", has_experts=True)
    refused("adapter='sql'", adapter="sql")
    refused("seed=-1", seed=-1)
    with pytest.raises(ValueError, match="computes rows, .* the config of its backend"):
        Engine(executor())
    with pytest.raises(ValueError, match="give the engine a .*EngineConfig"):
        Engine(Smaller(), DiffusionConfig())
    with pytest.raises(ValueError, match="is_causal=False"):
        ModelExecutor(POINTWISE, {})
    plain = ExecutionConfig()
    assert "is_causal=True" in str(why_not_filled(MODEL, plain))
    assert why_not_filled(CHOICE, plain) is None
    limited = dataclasses.replace(POINTWISE, moe=CAPPED)
    assert "model.moe.capacity" in str(why_not_filled(limited, plain))
    mesh = dataclasses.replace(plain, mesh=MeshConfig(data=2))
    assert "execution.mesh.data=2" in str(why_not_filled(POINTWISE, mesh))
    for text, build in (
        ("rows=0", lambda: DiffusionSizes(rows=0)),
        ("budget=0", lambda: DiffusionSizes(budget=0)),
        ("lengths=", lambda: DiffusionSizes(lengths=(8, 4))),
        ("steps_per_token=0", lambda: DiffusionConfig(steps_per_token=0.0)),
        ("max_waiting=0", lambda: DiffusionConfig(max_waiting=0)),
        ("max_waiting=0", lambda: EngineConfig(max_waiting=0)),
    ):
        with pytest.raises(ValueError, match=text):
            build()
