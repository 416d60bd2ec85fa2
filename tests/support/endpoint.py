# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""An endpoint whose answers are spelled, not computed: after a letter comes the next one.

`python -m tests.support.endpoint PORT` serves it in a process of its own, until it is killed.
"""

import asyncio
import contextlib
import socket
import sys
import threading
import time

import numpy as np

from jaxmoe.data.chat.built_in import ChatML
from jaxmoe.data.tokenizer import ByteTokenizer
from jaxmoe.serve.engine import Engine, EngineConfig
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.http.app import Endpoint, EndpointConfig
from jaxmoe.serve.http.served import ChatFormat, Served
from jaxmoe.serve.http.server import make_server
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.requests import Result
from sharding import MeshConfig

BYTES = ByteTokenizer()
TOP = ((97, -0.5), (98, -1.5))


class Text:
    """Bytes as text."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(int(token) for token in tokens).decode("utf-8", "replace")

    def token_bytes(self, token, *, is_first=False):
        return bytes([token])


class Speller:
    """Draws the letter after the last one, and waits before each step."""

    mesh = MeshConfig()

    def __init__(self, seconds=0.0, answer=None, *, top=TOP, largest=255):
        self.seconds, self.answer, self.fails = seconds, answer, False
        self.top, self.largest = top, largest
        self.adapters = set()
        self.embeds = True

    def facts(self, *, max_waiting):
        return Facts(
            num_pages=64,
            page_size=4,
            max_running=4,
            max_length=128,
            max_waiting=max_waiting,
            shapes=Shapes(singles=4, pieces=((1, 16),)),
        )

    def check(self, request):
        if max(request.prompt) > self.largest:
            raise ValueError(f"prompt holds ids above {self.largest}")

    def run(self, step):
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("no device")
        self.adapters |= {work.adapter for work in step.works}
        return {
            work.id: Result(
                self._next(work),
                -0.5,
                self.top[: work.sampling.num_logprobs],
                self._experts(work),
                embedding=np.array([3.0, len(work.tokens)]) if self.embeds else None,
            )
            for work in (*step.singles, *step.pieces)
            if work.draws
        }

    def reset(self):
        pass

    def expert_load(self):
        return np.array([[1.0, 3.0], [2.0, 2.0]])

    def _experts(self, work):
        """Experts [tokens 2 1] of what was not told of yet: the position, and the layer."""
        end = work.start + len(work.tokens)
        where = np.arange(end - 1 if work.index else 0, end, dtype=np.uint8)
        layers = np.stack([where, where + 100], axis=-1)[..., None]
        return layers if work.sampling.has_experts else None

    def _next(self, work):
        if self.answer is not None:
            return self.answer[work.index % len(self.answer)]
        return ord("a") + (work.tokens[-1] - ord("a") + 1 + work.sampling.seed % 2) % 26


@contextlib.contextmanager
def serving(
    executor=None,
    config=None,
    *,
    max_waiting=8,
    has_chat=True,
    chat=None,
    port=0,
    adapters=None,
    has_experts=True,
    make_engine=None,
    routes=None,
    codec=None,
    app=None,
    eos_ids=(),
    defaults=None,
    grammars=None,
    tool_parser=None,
    reasoning=None,
    takes_priority=False,
    pooling_type="last",
    **limits,
):
    """Yield the address, the endpoint and the executor of a server in a thread."""
    executor = executor or Speller()
    chat = chat or (ChatFormat(template=ChatML(), tokenizer=BYTES) if has_chat else None)
    config = config or EngineConfig(max_waiting=max_waiting)
    codec = codec or Text()
    engine = (make_engine or Engine)(executor, config, codec=codec)
    given = {"codec": codec, "chat": chat, "max_logprobs": 2, "adapters": adapters or {}}
    given |= {"has_experts": has_experts, "eos_ids": eos_ids, "defaults": defaults or {}}
    given |= {"grammars": grammars, "tool_parser": tool_parser}
    given |= {"takes_priority": takes_priority, "pooling_type": pooling_type}
    given |= {} if reasoning is None else {"reasoning": reasoning}
    further = {} if routes is None else routes(engine)
    served = Served(name="speller", engine=engine, routes=further, **given)
    endpoint = Endpoint(served, EndpointConfig(**limits))
    endpoint.app = app or endpoint.app
    with answering(endpoint, engine, port) as address:
        yield address, endpoint, executor


@contextlib.contextmanager
def answering(endpoint, engine, port=0):
    """Yield the address of a server of an endpoint in a thread; its engine ends with it."""
    listening = socket.create_server(("127.0.0.1", port))
    server = make_server(endpoint, log_level="error")
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    with engine:
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
    assert not engine.metrics.pages_used


if __name__ == "__main__":
    with serving(Speller(0.0005), max_waiting=64, port=int(sys.argv[1])) as (address, _, _):
        print(address, flush=True)
        threading.Event().wait()
