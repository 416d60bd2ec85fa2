# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What is taken in: all answers of a request or none, who goes first, nothing before the start."""

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request

import openai
import pytest

from jaxmoe.serve.engine import Engine, EngineConfig
from jaxmoe.serve.http.server import StartingPort
from jaxmoe.serve.requests import Sampling
from tests.support.endpoint import Speller, serving


class Counting(Speller):
    """Counts its steps, each of which waits for `gate`."""

    def __init__(self):
        super().__init__()
        self.num_steps, self.gate = 0, threading.Event()
        self.gate.set()

    def run(self, step):
        self.num_steps += 1
        assert self.gate.wait(60)
        return super().run(step)


def completion(address, **fields):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        return client.completions.create(model="speller", max_tokens=3, **fields)


def test_a_request_of_more_answers_than_may_wait_is_refused_before_a_step():
    with serving(Counting(), max_waiting=8) as (address, _, executor):
        with pytest.raises(openai.BadRequestError, match="3 prompts with n=128 are 384 answers"):
            completion(address, prompt=["a", "b", "c"], n=128)
        assert executor.num_steps == 0
        answer = completion(address, prompt=["a", "b"], n=4, seed=0)
        assert [choice.text[:1] for choice in answer.choices] == ["b", "c", "b", "c"] + [
            "c",
            "d",
            "c",
            "d",
        ]


def test_answers_of_one_request_are_admitted_together_or_refused_together():
    """Also while the others of a prompt wait for its first token."""
    executor = Counting()
    executor.gate.clear()
    with Engine(executor, EngineConfig(max_waiting=8)) as engine:
        with engine.held():
            first = engine.submit_all([(97,), (98,)], Sampling(max_tokens=2), 3)
            refused = engine.submit_samples((97,), Sampling(max_tokens=2), 3)
            alone = engine.submit_all([(97,), (98,)], Sampling(max_tokens=2))
            late = engine.submit((97,), Sampling(max_tokens=2))
        ends = [[*stream][-1] for stream in refused]
        assert [end.reason for end in ends] == ["refused"] * 3
        assert "3 answers do not fit into the queue, which has 2 free places" in ends[0].message
        assert [*late][-1].reason == "refused", "the places of followers are taken"
        executor.gate.set()
        whole = [[*stream][-1].reason for stream in (*first, *alone)]
        assert whole == ["length"] * 8
        assert engine.metrics.num_ended == {"refused": 4, "length": 8}


def test_a_priority_needs_a_key_or_the_flag():
    with serving() as (address, _, _):
        assert completion(address, prompt="a", extra_body={"priority": -3}).choices
        with pytest.raises(openai.BadRequestError, match="priority=1 would go before") as caught:
            completion(address, prompt="a", extra_body={"priority": 1})
        assert caught.value.param == "priority" and "--has_priority" in caught.value.message
    with serving(takes_priority=True) as (address, _, _):
        assert completion(address, prompt="a", extra_body={"priority": 1}).choices


def test_a_port_answers_503_until_the_server_begins():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with StartingPort(listening):
            silent = socket.create_connection(("127.0.0.1", port))  # sends nothing
            for method, body in (("GET", None), ("POST", b"x" * 500_000)):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request(method, "/v1/completions", body)
                answer = connection.getresponse()
                assert (answer.status, answer.getheader("Retry-After")) == (503, "5")
                assert json.loads(answer.read())["error"]["code"] == "starting"
                connection.close()
            silent.close()
        assert listening.gettimeout() is None
    with serving() as (address, _, _):
        assert urllib.request.urlopen(f"{address}/health").status == 200
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
