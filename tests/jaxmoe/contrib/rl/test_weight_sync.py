# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Updates of weights: every bit arrives, the bytes are those of the formula, damage is refused."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxmoe.contrib.rl.engine_parameters import EngineParameters
from jaxmoe.contrib.rl.weight_sync import (
    BUCKET_BYTES,
    UPDATE_BYTES,
    UpdateError,
    apply,
    payload_bytes,
    update,
)
from jaxmoe.tracking.tracker import SYNC_BYTES, SYNC_SHARE

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}
# Zeros of both signs, infinities, and NaNs that differ in sign and payload.
ADVERSARIAL = {
    4: [0, 1 << 31, 0x7F800000, 0x7FC00000, 0xFFC00000, 0x7FC00001, 0x7F800001, 1],
    2: [0, 1 << 15, 0x7F80, 0x7FC0, 0xFFC0, 0x7FC1, 0x7F81, 1],
    1: [0, 1, 127, 128, 255],
}


def bits(array):
    array = np.ascontiguousarray(array)
    return array.reshape(-1).view(f"u{array.itemsize}")


@st.composite
def versions(draw):
    """Two versions of a tree, which differ in some bits."""
    trees = {}, {}
    for index in range(draw(st.integers(1, 3))):
        dtype = np.dtype(DTYPES[draw(st.sampled_from(sorted(DTYPES)))])
        shape = draw(st.sampled_from([(), (0,), (7,), (3, 5), (40,)]))
        values = st.sampled_from(ADVERSARIAL[dtype.itemsize]) | st.integers(
            0, 2 ** (8 * dtype.itemsize) - 1
        )
        kind = f"u{dtype.itemsize}"
        old = draw(hnp.arrays(kind, shape, elements=values))
        new = draw(hnp.arrays(kind, shape, elements=values))
        mask = draw(hnp.arrays(bool, shape, elements=st.booleans()))
        for tree, words in zip(trees, (old, np.where(mask, new, old)), strict=True):
            tree[f"leaf{index}"] = {"kernel": np.asarray(words, kind).view(dtype)}
    return trees


@settings(max_examples=40, deadline=None)
@given(trees=versions(), bucket=st.sampled_from([1, 4, 16, 1 << 16, 1 << 20]))
def test_every_bit_arrives_and_the_bytes_are_those_of_the_formula(trees, bucket):
    old, new = trees
    before = [bits(leaf).copy() for leaf in jax.tree.leaves(old)]
    change = update(old, new, bucket=bucket)
    found = apply(old, change)
    assert jax.tree.structure(found) == jax.tree.structure(new)
    wanted = UPDATE_BYTES
    for have, want, kept, was in zip(*map(jax.tree.leaves, (found, new, old)), before, strict=True):
        assert have.dtype == want.dtype and have.shape == want.shape
        np.testing.assert_array_equal(bits(have), bits(want))
        np.testing.assert_array_equal(bits(kept), was)
        for start in range(0, want.size, bucket):
            part = slice(start, start + bucket)
            changed = int((bits(want)[part] != was[part]).sum())
            index = 2 if bucket <= 1 << 16 else 4
            size = payload_bytes(changed, len(was[part]), want.itemsize, index)
            wanted += size + BUCKET_BYTES * (changed > 0)
    assert change.num_bytes == wanted
    assert change.total_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(new))
    assert not update(new, new, bucket=bucket).buckets


@pytest.mark.parametrize(("bucket", "index"), [(1 << 16, 2), (1 << 17, 4)])
def test_a_bucket_is_dense_above_the_share_where_that_is_smaller(bucket, index):
    """bfloat16 with gaps of 4 bytes: above a third of the elements."""
    size = 600
    old = np.zeros(size, ml_dtypes.bfloat16)
    limit = size * 2 // (2 + index)
    for changed in (1, limit - 1, limit, limit + 1, size):
        new = old.copy()
        new[:changed] = 1
        change = update(old, new, bucket=bucket)
        sent = len(change.buckets[0].payload)
        assert sent == (changed * (2 + index) if changed <= limit else size * 2)
        np.testing.assert_array_equal(apply(old, change), new)


@pytest.fixture(scope="module")
def example():
    rng = np.random.default_rng(0)
    old = {"a": rng.standard_normal((40, 50)).astype(np.float32), "b": np.zeros(9, np.int8)}
    new = {name: array.copy() for name, array in old.items()}
    new["a"][::7, ::11] += 1
    new["b"][3] = -1
    return old, new, update(old, new, bucket=500)


def test_damage_of_any_part_is_refused_in_words(example):
    old, new, change = example
    assert len(change.buckets) == 5 and change.num_bytes < change.total_bytes / 10
    for number, one in enumerate(change.buckets):
        for damaged in (
            dataclasses.replace(one, payload=bytes([one.payload[0] ^ 1]) + one.payload[1:]),
            dataclasses.replace(one, payload=one.payload[:-1]),
            dataclasses.replace(one, start=one.start + 1),
            dataclasses.replace(one, checksum=one.checksum ^ 1),
        ):
            buckets = list(change.buckets)
            buckets[number] = damaged
            with pytest.raises(UpdateError, match=f"bucket {number + 1} of 5 .*damaged"):
                apply(old, dataclasses.replace(change, buckets=tuple(buckets)))
        lost = change.buckets[:number] + change.buckets[number + 1 :]
        with pytest.raises(UpdateError, match="a bucket is missing or of another update"):
            apply(old, dataclasses.replace(change, buckets=lost))
    np.testing.assert_array_equal(apply(old, change)["a"], new["a"])


def test_sizes_and_places_that_lie_are_refused(example):
    """Buckets whose checksums are right, as a faulty sender makes them."""
    old, _, change = example

    def resealed(**values):
        one = dataclasses.replace(change.buckets[-1], **values)
        one = dataclasses.replace(one, checksum=one.compute_checksum())
        return dataclasses.replace(change, buckets=(*change.buckets[:-1], one))

    for values, message in (
        ({"leaf": 2}, "lies outside of the parameters"),
        ({"start": 10}, "lies outside of the parameters"),
        ({"changed": 2}, "has 3 bytes in place of 6"),
        ({"payload": b"\xff\xff\x00"}, "lies outside of its array"),
    ):
        with pytest.raises(UpdateError, match=message):
            apply(old, resealed(**values))


def test_an_update_is_applied_to_its_own_version_alone(example):
    old, new, change = example
    for other in (new, {"a": old["a"]}, {**old, "b": old["b"].view(np.uint8)}):
        with pytest.raises(UpdateError, match="changes version [0-9a-f]{8}, and here is"):
            apply(other, change)
    # The same bits of another sign of zero are another version.
    with pytest.raises(UpdateError, match="send the whole parameters"):
        apply({"z": np.float32(-0.0)}, update({"z": np.float32(0)}, {"z": np.float32(1)}))


def test_trees_of_another_structure_are_refused(example):
    old, _, _ = example
    for other, message in (
        ({"a": old["a"]}, "'b'.* became 1 arrays"),
        ({**old, "a": old["a"].T}, r"'a'.*\[40, 50\] became .*\[50, 40\]"),
        ({**old, "b": old["b"].astype(np.int16)}, "int8.* became .*int16"),
    ):
        with pytest.raises(ValueError, match=message):
            update(old, other)
    with pytest.raises(ValueError, match="bucket=0 must be from 1"):
        update(old, old, bucket=0)
    with pytest.raises(ValueError, match="more than 8 bytes"):
        update(np.zeros(1, complex), np.zeros(1, complex))


def test_parameters_of_the_engine_follow_those_in_training():
    rng = np.random.default_rng(0)
    params = {"w": jax.numpy.asarray(rng.standard_normal((64, 64)), jax.numpy.float32)}
    exact, rounded = EngineParameters("exact"), EngineParameters("bfloat16")
    for step in range(3):
        for engine, item in ((exact, 4), (rounded, 2)):
            held, measures = engine.follow(params)
            is_exact = engine is exact
            wanted = np.asarray(params["w"])
            if not is_exact:
                wanted = wanted.astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(held["w"], wanted)
            assert held["w"].dtype == np.float32
            total = 64 * 64 * item
            assert measures[SYNC_SHARE] == measures[SYNC_BYTES] / total
            if step == 0:
                assert measures[SYNC_BYTES] == total
            else:  # few elements reach another bfloat16; in float32 all change
                assert (measures[SYNC_SHARE] < 0.05) != is_exact
        params = {"w": params["w"] * np.float32(1 + 1e-5)}
