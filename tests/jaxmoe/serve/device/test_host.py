# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory keeps copies of pages by name: tokens stay, and only what is new travels."""

import numpy as np
import pytest

from jaxmoe.serve import Sampling
from jaxmoe.serve.answers import Generated
from jaxmoe.serve.device.host import HostPages
from jaxmoe.serve.device.pages import page_bytes
from jaxmoe.serve.device.transfers import HeldPages
from jaxmoe.serve.engine import Engine, EngineConfig
from jaxmoe.serve.policies.batching import SplitFuseConfig
from jaxmoe.serve.policies.retention import LRURetentionConfig, SwapGroupsConfig
from jaxmoe.serve.step import Swap
from tests.support.serving import MODEL, SIZES, Smaller, check_answers, executor


class Logged(Smaller):
    """The executor of the session, with the steps that it has run."""

    steps = []

    def launch(self, step):
        self.steps.append(step)
        return Smaller.launch(self, step)


def swapped(retention):
    """Return the answers of requests that do not fit together, and the steps."""
    given = {
        id_: (tuple(range(1 + id_, 7 + id_)), Sampling(max_tokens=20, temperature=1.0, seed=id_))
        for id_ in range(4)
    }
    executor().reset()
    Logged.steps = []
    config = EngineConfig(batching=SplitFuseConfig(budget=8), retention=retention)
    with Engine(Logged(num_pages=8), config) as engine:
        with engine.held():
            streams = {id_: engine.submit(*one) for id_, one in given.items()}
        found = {
            id_: [one.token for one in stream if isinstance(one, Generated)]
            for id_, stream in streams.items()
        }
        assert engine.drain(timeout=60) and engine.metrics.num_preempted
    check_answers(given, found)
    return found, Logged.steps, engine


@pytest.fixture(scope="module")
def computed_again():
    return swapped(LRURetentionConfig())[0]


@pytest.mark.parametrize("host", [4.0, 0.25, 0.0])
def test_tokens_of_swapped_requests_are_those_computed_again(host, computed_again):
    before = executor().moved_bytes
    found, steps, engine = swapped(SwapGroupsConfig(group=2, host=host))
    assert found == computed_again
    out = [swap for step in steps for swap in step.out]
    back = [swap for step in steps for swap in step.back]
    assert out and len(out) == len(back)
    assert any(swap.kept for swap in out) == (host == 4.0)
    moved = sum(len(swap.pages) - swap.kept for swap in (*out, *back))
    size = page_bytes(MODEL, executor().execution, SIZES.page_size)
    assert executor().moved_bytes - before == moved * size
    instance = engine._members.all[0].instance
    assert executor().host_bytes == len(instance.host._names) * size
    assert (executor().host_bytes > 0) == (host > 0)


def page(number):
    return {"kv": np.full((1, 1, 2), number, np.float32)}


def read(pages):
    parts = [page(number)["kv"] for number in pages]
    return HeldPages({"kv": np.concatenate(parts, 1)}, np.zeros((len(pages), 2, 0, 0)))


def test_a_dropped_sequence_frees_its_pages_and_names_keep_theirs():
    host, written, size = HostPages(), {}, page(0)["kv"].nbytes
    first = Swap(id=0, pages=(3, 4, 5), num_tokens=5, names=(b"a", b"b"))
    host.out(first, read)
    assert host.nbytes == 3 * size
    # Host memory has the first page: what the device has there now is not read.
    host.out(Swap(id=1, pages=(7, 8), num_tokens=4, kept=1, names=(b"a", b"c")), read)
    assert host.nbytes == 4 * size
    host.drop(0)
    assert host.nbytes == 3 * size  # a, b and c
    host.out(Swap(id=2, pages=(9,), num_tokens=2, names=(b"d",), dropped=(b"a", b"b")), read)
    assert host.nbytes == 3 * size  # a stays for sequence 1
    host.back(
        Swap(id=1, pages=(1, 2), num_tokens=4),
        lambda pages, held: written.update(zip(pages, held.pools["kv"][0, :, 0], strict=True)),
    )
    assert written == {1: 3.0, 2: 8.0} and host.nbytes == 2 * size
    host.drop(2)
    host.drop(2)
    assert host.nbytes == 2 * size  # c and d
