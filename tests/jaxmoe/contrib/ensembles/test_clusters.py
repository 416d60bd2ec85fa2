# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Clusters: features against counting by hand, causal prefixes, planted clusters, determinism."""

import math

import numpy as np
import pytest

from jaxmoe.contrib.ensembles.clusters import (
    MOST_TOKENS,
    NUM_BUCKETS,
    Clusters,
    assign_documents,
    document_features,
    fit_documents,
    prefix_features,
)
from jaxmoe.data import DataError


def hashed(key):
    """SplitMix64's finaliser in Python integers: bucket and sign."""
    mask = 2**64 - 1
    key = (key + 0x9E3779B97F4A7C15) & mask
    key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & mask
    key = ((key ^ key >> 27) * 0x94D049BB133111EB) & mask
    key ^= key >> 31
    return key % NUM_BUCKETS, 1 if key >> 63 else -1


def counted(tokens):
    """Features of a text, one n-gram at a time."""
    counts = [0] * NUM_BUCKETS
    for place, token in enumerate(tokens):
        keys = [2 * token]
        if place:
            keys.append(2 * (tokens[place - 1] * 2**32 + token) + 1)
        for bucket, sign in map(hashed, keys):
            counts[bucket] += sign
    damped = [math.copysign(math.log1p(abs(count)), count) for count in counts]
    norm = math.sqrt(sum(value**2 for value in damped)) or 1.0
    return np.array([value / norm for value in damped])


def planted(num_clusters=4, each=12, length=60, seed=0):
    """Documents over vocabularies of 8 ids of their cluster and 4 shared ones, and clusters."""
    random = np.random.default_rng(seed)
    documents, truth = [], []
    for cluster in range(num_clusters):
        ids = np.concatenate([np.arange(8) + 100 * cluster, 1000 + np.arange(4)])
        for _ in range(each):
            documents.append(random.choice(ids, length))
            truth.append(cluster)
    return documents, np.array(truth)


def partitioned(documents, num_parts):
    clusters = fit_documents(documents.__getitem__, len(documents), num_parts)
    return clusters, assign_documents(clusters, documents.__getitem__, len(documents))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32])
def test_features_equal_counting_by_hand(dtype):
    tokens = np.random.default_rng(0).integers(0, 200, 40).astype(dtype)
    prefixes = prefix_features(tokens)
    for end in (1, 2, 17, 40):
        expected = counted(tokens[:end].tolist())
        np.testing.assert_allclose(prefixes[end - 1], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(document_features(tokens[:end]), expected, rtol=0, atol=1e-12)
    assert np.allclose(np.linalg.norm(prefixes, axis=1), 1.0)


def test_prefix_features_see_nothing_later():
    tokens = np.random.default_rng(1).integers(0, 50, 32)
    before = prefix_features(tokens)
    for place in (0, 1, 16, 31):
        changed = tokens.copy()
        changed[place] += 1
        after = prefix_features(changed)
        np.testing.assert_array_equal(after[:place], before[:place])
        assert not np.array_equal(after[place], before[place])


def test_prefixes_of_packed_documents_are_those_of_each_alone():
    documents = [np.random.default_rng(n).integers(0, 50, size) for n, size in enumerate((9, 1, 6))]
    row, segments = np.concatenate(documents), np.repeat([1, 2, 3], [9, 1, 6])
    expected = np.concatenate([prefix_features(document) for document in documents])
    np.testing.assert_allclose(prefix_features(row, segments), expected, rtol=0, atol=1e-12)


def test_empty_texts_and_long_documents_have_features():
    assert prefix_features(np.zeros(0, np.int32)).shape == (0, NUM_BUCKETS)
    assert not document_features(np.zeros(0, np.int32)).any()
    tokens = np.random.default_rng(2).integers(0, 50, MOST_TOKENS + 7)
    whole = document_features(tokens)
    np.testing.assert_array_equal(whole, document_features(tokens[:MOST_TOKENS]))


def test_planted_clusters_are_found():
    documents, truth = planted()
    _, parts = partitioned(documents, 4)
    assert len({(part, cluster) for part, cluster in zip(parts, truth, strict=True)}) == 4
    assert len(set(parts.tolist())) == 4


def test_order_of_the_documents_does_not_matter():
    documents, _ = planted(each=7)
    clusters, parts = partitioned(documents, 3)
    again, same = partitioned(documents, 3)
    np.testing.assert_array_equal(again.centroids, clusters.centroids)
    np.testing.assert_array_equal(same, parts)
    rotated, moved = partitioned(documents[5:] + documents[:5], 3)
    np.testing.assert_array_equal(rotated.centroids, clusters.centroids)
    assert rotated.digest() == clusters.digest()
    np.testing.assert_array_equal(moved, np.concatenate([parts[5:], parts[:5]]))


@pytest.mark.parametrize("num_parts", [1, 2, 11, 24])
def test_no_part_is_empty(num_parts):
    documents, _ = planted(num_clusters=2, each=12)
    _, parts = partitioned(documents, num_parts)
    assert set(parts.tolist()) == set(range(num_parts))


def test_fewer_documents_than_parts_are_refused():
    documents = [np.array([1, 2, 3]), np.array([4, 5]), np.array([1, 2, 3])]
    with pytest.raises(DataError) as refused:
        partitioned(documents, 3)
    assert str(refused.value) == (
        "data.partition asks for 3 parts, and the training data have 3 documents with 2 different"
        " contents: ask for at most 2 parts, or bring more documents"
    )
    with pytest.raises(DataError, match="have 0 documents with 0 different"):
        partitioned([], 2)


def test_a_file_keeps_centroids_and_digest(tmp_path):
    clusters, _ = partitioned(planted()[0], 4)
    file = tmp_path / "partition.npz"
    file.write_bytes(clusters.to_bytes())
    read = Clusters.read(file)
    np.testing.assert_array_equal(read.centroids, clusters.centroids)
    assert read.digest() == clusters.digest()
    moved = Clusters(centroids=clusters.centroids + 1e-6)
    assert moved.digest() != clusters.digest()
    file.write_bytes(clusters.to_bytes()[:100])
    with pytest.raises(DataError, match="holds no centroids"):
        Clusters.read(file)
