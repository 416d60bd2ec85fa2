# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What every feed promises: shapes that are compiled for, and batches in the order of the steps.

A vertical with a feed imports these tests beside a fixture `feed` of its own.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from jaxmoe.contrib.levels import BucketsConfig
from jaxmoe.data import Batch, Loader
from jaxmoe.data.synthetic import MarkovConfig
from jaxmoe.training.feed import Feed, LoaderFeed
from sharding.distributed import global_batch
from tests.jaxmoe.contrib.levels.test_rows import loader_of

STEPS = 4


def one_device():
    return jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))


def _of_loader():
    loader = Loader(MarkovConfig().build(), batch_size=2, sequence_length=8, seed=0)
    return LoaderFeed(loader=loader, mesh=one_device(), part=(0, 1), last_step=STEPS)


def _of_levels():
    loader = loader_of(BucketsConfig())
    return LoaderFeed(loader=loader, mesh=one_device(), part=(0, 1), last_step=STEPS)


FEEDS = {"loader": _of_loader, "levels": _of_levels}


@pytest.fixture(params=FEEDS)
def feed(request) -> Feed:
    return FEEDS[request.param]()


def _arrays(batch):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]


def _batches(feed, first_step):
    """The batches up to the last step."""
    with contextlib.closing(feed.batches(first_step)) as batches:
        return [_arrays(batch) for batch in itertools.islice(batches, STEPS - first_step)]


def _session(feed, step_function):
    no_state = functools.partial(pytest.fail, "no state is needed")
    return feed.session(step_function, lambda step, values: None, no_state)


def test_a_later_step_has_the_same_batch_wherever_a_loop_begins(feed):
    whole = _batches(feed, 0)
    assert len(whole) == STEPS
    jax.tree.map(np.testing.assert_array_equal, _batches(feed, 2), whole[2:])


def test_the_batch_that_is_compiled_for_has_the_shapes_of_all(feed):
    shapes = [(leaf.shape, leaf.dtype) for leaf in _arrays(feed.batch(1))]
    for batch in _batches(feed, 1):
        assert [(leaf.shape, leaf.dtype) for leaf in batch] == shapes


@pytest.mark.parametrize("name", FEEDS)
def test_positions_are_those_without_padding(name):
    """Whatever their loss weights."""
    feed = FEEDS[name]()
    with contextlib.closing(feed.batches(0)) as batches:
        for batch in itertools.islice(batches, STEPS):
            ids = batch.segment_ids
            wanted = batch.tokens.size if ids is None else int((np.asarray(ids) != 0).sum())
            answers = dataclasses.replace(batch, loss_weights=0.0 * batch.loss_weights)
            assert feed.positions(batch) == feed.positions(answers) == wanted > 0


def test_positions_of_copies_are_counted_once():
    """Rows over data, copied over tensor: each process sees the copies too."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    ids = np.zeros((4, 8), np.int32)
    ids[0, :5] = 1
    ids[3, :2] = 2
    batch = global_batch(
        Batch(tokens=ids, targets=ids, loss_weights=ids * 0.1, segment_ids=ids), mesh
    )
    assert dataclasses.replace(_of_loader(), mesh=mesh).positions(batch) == 7


def test_a_session_may_end_without_a_step_and_another_follow(feed):
    for _ in range(2):
        with _session(feed, lambda *pair: pair):
            pass


def test_a_step_is_taken_on_each_batch_as_it_comes():
    feed = _of_loader()
    feed.check()
    with _session(feed, lambda *pair: pair) as step:
        assert step("state", "batch") == ("state", "batch")
