# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Forks and moves of running sequences change no token."""

from __future__ import annotations

import pytest

from jaxmoe.contrib.fleet.moves import depart, fork, receive, release_departed, stay
from jaxmoe.serve import BATCHING, Facts, Instance, Request, Sampling
from tests.support.page_executor import PageExecutor, Streams, answer

FACTS = Facts(num_pages=10, page_size=4, max_running=4, max_length=40)


def serving(facts=FACTS):
    return Instance(facts), BATCHING["split_fuse"]().build(facts), PageExecutor(facts)


def steps(instance, policy, executor, streams, count=1000):
    for time in range(count):
        if instance.is_idle:
            return
        for step in instance.start(policy(instance.view(float(time))), float(time)):
            streams.add(instance.apply(step, executor.run(step), float(time + 1)))
        instance.check_pages()


@pytest.mark.parametrize("length", range(2, 10))
def test_a_fork_at_every_place_of_a_page_shares_pages_and_changes_no_token(length):
    instance, policy, executor = serving()
    streams = Streams()
    request = Request(id=0, prompt=tuple(range(length)), sampling=Sampling(max_tokens=9))
    instance.submit(request, 0.0)
    steps(instance, policy, executor, streams, 3)
    here = tuple(instance.queues.running[0].tokens)
    forks = [Request(id=id_, prompt=here, sampling=Sampling(max_tokens=5 + id_)) for id_ in (1, 2)]
    computed = instance.num_computed
    for other in forks:
        assert fork(instance, 0, other, 3.0) == ()
        instance.check_pages()
    steps(instance, policy, executor, streams)
    assert streams.tokens == {r.id: answer(r, 40) for r in (request, *forks)}
    assert instance.num_computed - computed == 6 + 6 + 7  # no token of the beginning again
    assert instance.pool.num_free == 10


def test_a_fork_without_a_free_page_waits_as_any_other():
    facts = Facts(num_pages=2, page_size=4, max_running=4, max_length=8)
    instance, policy, executor = serving(facts)
    streams = Streams()
    request = Request(id=0, prompt=(1, 2, 3, 4, 5), sampling=Sampling(max_tokens=2))
    instance.submit(request, 0.0)
    steps(instance, policy, executor, streams, 1)
    other = Request(
        id=1, prompt=tuple(instance.queues.running[0].tokens), sampling=Sampling(max_tokens=1)
    )
    assert fork(instance, 0, other, 1.0) == ()
    assert [one.id for one in instance.queues.waiting] == [1]
    steps(instance, policy, executor, streams)
    assert streams.tokens[1] == answer(other, 8)


def test_a_fork_begins_as_its_source_does():
    instance, policy, executor = serving()
    instance.submit(Request(id=0, prompt=(1, 2)), 0.0)
    steps(instance, policy, executor, Streams(), 1)
    with pytest.raises(ValueError, match="request 1 does not begin as sequence 0 does now"):
        fork(instance, 0, Request(id=1, prompt=(1, 2)), 1.0)


@pytest.mark.parametrize("after", range(1, 8))
def test_a_move_at_every_step_changes_no_token(after):
    source, policy, executor = serving()
    target, _, other = serving()
    streams = Streams()
    requests = [
        Request(id=id_, prompt=tuple(range(id_, id_ + 6)), sampling=Sampling(max_tokens=9))
        for id_ in range(2)
    ]
    for request in requests:
        source.submit(request, 0.0)
    steps(source, policy, executor, streams, after)
    one = depart(source, 0)
    steps(source, policy, executor, streams, 1)  # the rest goes on meanwhile
    here = receive(target, one)
    assert here is not None
    other.write(here.pages, 0, executor.read(one.pages, one.computed))
    release_departed(source, 0)
    source.check_pages()
    target.check_pages()
    steps(target, policy, other, streams)
    steps(source, policy, executor, streams)
    assert streams.tokens == {r.id: answer(r, 40) for r in requests}
    assert source.queues.moved_away == 1 and target.queues.submitted == 1


def test_a_move_that_is_taken_back_changes_nothing():
    instance, policy, executor = serving()
    streams = Streams()
    request = Request(id=0, prompt=(1, 2, 3))
    instance.submit(request, 0.0)
    steps(instance, policy, executor, streams, 2)
    depart(instance, 0)
    assert policy(instance.view(3.0)).num_tokens == 0
    stay(instance, 0)
    steps(instance, policy, executor, streams)
    assert streams.tokens[0] == answer(request, 40)


def test_an_instance_without_room_receives_nothing():
    source, policy, executor = serving()
    source.submit(Request(id=0, prompt=tuple(range(12))), 0.0)
    steps(source, policy, executor, Streams(), 1)
    full, _, _ = serving(Facts(num_pages=2, page_size=4, max_length=8))
    assert receive(full, depart(source, 0)) is None
    full.check()
    assert full.pool.num_free == 2
