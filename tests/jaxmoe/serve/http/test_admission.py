# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What is taken in: all answers of a request or none, who goes first, nothing before the start."""

import asyncio
import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import httpx2 as httpx
import openai
import pytest

from jaxmoe.serve.answers import Ended
from jaxmoe.serve.engine import Engine, EngineConfig
from jaxmoe.serve.http.app import Endpoint
from jaxmoe.serve.http.served import Served
from jaxmoe.serve.http.server import StartingPort
from jaxmoe.serve.http.streams import failure
from jaxmoe.serve.requests import Sampling
from tests.support.endpoint import Speller, Text, serving


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


class Lost(Speller):
    """A device that is lost and does not begin again."""

    def reset(self):
        raise RuntimeError("device lost")


def test_an_engine_that_has_failed_answers_503():
    executor = Lost()
    executor.fails = True

    async def ask(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            body = {"prompt": "a", "max_tokens": 3}
            first = await client.post("/v1/completions", json=body)
            return first, await client.post("/v1/completions", json=body | {"stream": True})

    with Engine(executor, EngineConfig(), codec=Text()) as engine:
        served = Served(name="speller", engine=engine, codec=Text())
        first, later = asyncio.run(ask(Endpoint(served).app))
    assert first.status_code == 500 and first.json()["error"]["code"] == "engine_error"
    assert later.status_code == 503 and "retry-after" not in later.headers
    assert later.json()["error"]["code"] == "engine_error"
    assert "device lost" in later.json()["error"]["message"]


def test_refusals_are_told_apart_by_their_code():
    """Whatever their words."""
    for code, status in (("queue_full", 429), ("draining", 503), ("engine_error", 503)):
        error = failure(Ended(reason="refused", message="the draining queue", code=code))
        assert (error.status, error.code) == (status, code)


TALK = [{"role": "user", "content": "x"}]
LONG = {
    "completions": {"prompt": "a", "max_tokens": 100},
    "chat/completions": {"messages": TALK, "max_tokens": 100},
    "responses": {"input": "x", "max_output_tokens": 100},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", LONG)
def test_an_answer_that_is_cut_off_at_the_end_of_the_server_is_an_error(route, stream):
    with serving(Speller(0.02)) as (address, endpoint, _):
        engine = endpoint._served.engine
        body = LONG[route] | {"stream": stream}

        def end():
            while engine.metrics.tokens_generated < 3:
                time.sleep(0.01)
            engine.cancel_all()

        thread = threading.Thread(target=end)
        thread.start()
        answer = httpx.post(f"{address}/v1/{route}", json=body, timeout=60)
        thread.join()
    if not stream:
        assert answer.status_code == 503 and answer.headers["retry-after"] == "30"
        assert answer.json()["error"]["code"] == "draining"
        return
    last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
    error = last["response"]["error"] if route == "responses" else last["error"]
    assert "the server is about to end" in error["message"]
    assert "cancelled" not in answer.text
