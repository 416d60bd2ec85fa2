# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The queue: its order, its sums, and what is kept beside it."""

from __future__ import annotations

import random

import pytest

from jaxmoe.serve import Request
from jaxmoe.serve.queues import WaitingQueue
from jaxmoe.serve.sequence import Sequence


def waiting(number, priority=0, length=3):
    request = Request(id=number, prompt=tuple(range(length)), priority=priority)
    return Sequence(request=request, order=number, arrived=0.0, page_size=2, tokens=request.prompt)


class Ids:
    """Ids that wait, as an index of the queue sees them."""

    def __init__(self):
        self.ids = set()

    def enter(self, sequence):
        assert sequence.id not in self.ids
        self.ids.add(sequence.id)

    def leave(self, sequence):
        self.ids.remove(sequence.id)


def test_a_queue_in_blocks_is_a_sorted_list(monkeypatch):
    monkeypatch.setattr("jaxmoe.serve.queues._BLOCK", 4)
    draw, queue, late, early = random.Random(0), WaitingQueue(), Ids(), Ids()
    expected: list[Sequence] = []
    queue.watch(early)
    for number in range(400):
        if expected and draw.random() < 0.4:
            sequence = draw.choice(expected)
            expected.remove(sequence)
            queue.leave(sequence)
        else:
            sequence = waiting(number, draw.randrange(3), draw.randrange(1, 9))
            expected = sorted([*expected, sequence], key=lambda one: one.rank)
            queue.enter(sequence)
        if number == 200:
            queue.watch(late)
            queue.watch(late)  # it is watched once
        assert [*queue] == expected and [*reversed(queue)] == expected[::-1]
        assert queue.num_tokens == sum(len(one.tokens) for one in expected)
        assert queue.num_pages == sum(-(-len(one.tokens) // 2) for one in expected)
        assert len(queue) == len(expected) and early.ids == {one.id for one in expected}
    assert late.ids == early.ids and len(expected) > 20
    for place in (0, 7, -1, -9):
        assert queue[place] is expected[place]
    for place in (slice(3), slice(2, 11), slice(-5, None), slice(None, None, -1), slice(9, 3)):
        assert queue[place] == tuple(expected[place])
    with pytest.raises(IndexError):
        queue[len(expected)]
    assert expected[3] in queue and waiting(expected[3].id) not in queue
    assert queue.find(expected[3].id) is expected[3] and queue.find(10_000) is None


def test_a_sequence_that_is_not_in_its_place_is_noticed():
    queue = WaitingQueue()
    with pytest.raises(AssertionError, match="sequence 1 is not in its place"):
        queue.leave(waiting(1))
    queue.enter(waiting(1))
    with pytest.raises(AssertionError, match="sequence 1 is not in its place"):
        queue.leave(waiting(1))
