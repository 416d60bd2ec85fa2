# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Clusters documents by k-means on hashed counts of their 1- and 2-grams.

A token, and a pair of adjacent tokens, is hashed to one of `NUM_BUCKETS` buckets and a sign. With n
the signed counts of a text,

    features = f / |f|,   f = sign(n) log(1 + |n|)

which are known for every prefix of a text (`prefix_features`), so that the cluster of a text can be
guessed while it is written. k-means begins with k-means++ (Arthur and Vassilvitskii, SODA 2007),
several times with fixed seeds. Documents are first ordered by a hash of their tokens, so that
their order in the data does not change the result. Centroids are rounded, because the last bits of
sums differ between machines.

Gururangan et al., "Scaling expert language models with unsupervised domain discovery" (arXiv
2303.14177), section 2, clusters tf-idf vectors; counts need no vocabulary and no second pass.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pathlib
import zipfile

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.order import frozen_generator
from jaxmoe.data.subset import Document
from pallas_kernels.array_types import Float, Int, Shaped

NUM_BUCKETS = 256
"""Width of the features."""
MOST_TOKENS = 4096
"""Tokens of a document that are counted, from its beginning."""
_FORMAT = 1
"""Version of the features; increased when their meaning changes."""
_MOST_DOCUMENTS = 2**14
"""Number of documents that k-means reads; those with the smallest hashes where there are more."""
_RESTARTS = 8
_ITERATIONS = 50
_DECIMALS = 6
_CHUNK = 4096
"""Documents whose features are in memory at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Clusters:
    """Centroids of the parts of a collection of documents."""

    centroids: Float[np.ndarray, "K d"]

    @property
    def num_parts(self) -> int:
        """Number of parts, K."""
        return len(self.centroids)

    def digest(self) -> str:
        """Return the sha256 of the centroids, which identifies the partition."""
        rounded = np.round(self.centroids * 10**_DECIMALS).astype("<i8")
        return hashlib.sha256(
            repr((_FORMAT, rounded.shape)).encode() + rounded.tobytes()
        ).hexdigest()

    def nearest(self, features: Float[np.ndarray, "N d"]) -> Int[np.ndarray, " N"]:
        """Return the part of each document, from 0."""
        return np.argmin(squared_distances(features, self.centroids), axis=1)

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        content = io.BytesIO()
        np.savez(content, centroids=self.centroids, format=_FORMAT)
        return content.getvalue()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Clusters:
        """Return the clusters in a file.

        Raises:
            DataError: The file is damaged, or of another version.
        """
        try:
            content = io.BytesIO(pathlib.Path(path).read_bytes())
            with np.load(content) as file:
                version = int(file["format"])
                centroids = file["centroids"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} holds no centroids ({error}): restore it") from error
        if version != _FORMAT:
            raise DataError(
                f"{path} has centroids of version {version}, and this library reads {_FORMAT}"
            )
        return cls(centroids=centroids)


def prefix_features(
    tokens: Shaped[np.ndarray, " S"], segment_ids: Int[np.ndarray, " S"] | None = None
) -> Float[np.ndarray, "S d"]:
    """Return the features of each prefix of a row: number s has seen tokens 0 to s.

    Args:
        tokens: Token ids.
        segment_ids: Document of each token; a prefix begins with its document. None: one document.
    """
    length = len(tokens)
    if not length:
        return np.zeros((0, NUM_BUCKETS))
    places = np.arange(length)
    counts = np.zeros((length, NUM_BUCKETS))
    buckets, signs = _hashed_tokens(tokens)
    counts[places, buckets] += signs
    buckets, signs = _hashed_pairs(tokens)
    if segment_ids is None:
        counts[places[1:], buckets] += signs
        return _normalize(np.cumsum(counts, axis=0))
    is_first = np.concatenate([[True], segment_ids[1:] != segment_ids[:-1]])
    counts[places[1:], buckets] += np.where(is_first[1:], 0.0, signs)
    before = np.cumsum(counts, axis=0) - counts
    begins = np.maximum.accumulate(np.where(is_first, places, 0))
    return _normalize(before + counts - before[begins])


def document_features(tokens: Shaped[np.ndarray, " S"]) -> Float[np.ndarray, " d"]:
    """Return the features of a document, those of its longest prefix; zeros if it is empty."""
    counts = np.zeros(NUM_BUCKETS)
    tokens = tokens[:MOST_TOKENS]
    for buckets, signs in (_hashed_tokens(tokens), _hashed_pairs(tokens)):
        counts += np.bincount(buckets, weights=signs, minlength=NUM_BUCKETS)
    return _normalize(counts)


def squared_distances(
    features: Float[np.ndarray, "*batch d"], centroids: Float[np.ndarray, "K d"]
) -> Float[np.ndarray, "*batch K"]:
    """Return |e - c|^2 of each vector and centroid."""
    squares = np.sum(features**2, axis=-1, keepdims=True) + np.sum(centroids**2, axis=-1)
    return np.maximum(squares - 2.0 * features @ centroids.T, 0.0)


def fit_documents(document: Document, num_documents: int, num_parts: int) -> Clusters:
    """Return the clusters of a collection of documents.

    Args:
        document: Tokens of each document.
        num_documents: Number of documents.
        num_parts: Number of clusters, K.

    Raises:
        DataError: There are fewer different documents than parts.
    """
    hashes = np.array([_hash_of(document(number)) for number in range(num_documents)], np.uint64)
    chosen = np.argsort(hashes, kind="stable")[:_MOST_DOCUMENTS].tolist()
    features = np.stack([document_features(document(number)) for number in chosen] or [_EMPTY])
    different = len(np.unique(features, axis=0)) if chosen else 0
    if different < num_parts:
        raise DataError(
            f"data.partition asks for {num_parts} parts, and the training data have"
            f" {num_documents} documents with {different} different contents: ask for at most"
            f" {max(different, 1)} parts, or bring more documents"
        )
    return Clusters(centroids=np.round(_fit(features, num_parts), _DECIMALS))


def assign_documents(
    clusters: Clusters, document: Document, num_documents: int
) -> Int[np.ndarray, " documents"]:
    """Return the part of each document, from 0.

    Args:
        clusters: Centroids of the parts.
        document: Tokens of each document.
        num_documents: Number of documents.
    """
    parts = np.zeros(num_documents, np.int64)
    for first in range(0, num_documents, _CHUNK):
        chunk = range(first, min(first + _CHUNK, num_documents))
        features = np.stack([document_features(document(number)) for number in chunk])
        parts[first : first + len(chunk)] = clusters.nearest(features)
    return parts


def _fit(features: np.ndarray, num_parts: int) -> np.ndarray:
    """Return the centroids [K d] with the smallest summed distance of all restarts."""
    fits = [
        _lloyd(features, _first_centroids(features, num_parts, frozen_generator(restart)))
        for restart in range(_RESTARTS if num_parts > 1 else 1)
    ]
    return min(fits, key=lambda pair: pair[0])[1]


def _first_centroids(
    features: np.ndarray, num_parts: int, generator: np.random.RandomState
) -> np.ndarray:
    """Return centroids that are documents, each drawn by its distance from those before it."""
    chosen = [int(generator.random_sample() * len(features))]
    least = squared_distances(features, features[chosen])[:, 0]
    while len(chosen) < num_parts:
        least[chosen] = 0.0
        total = np.cumsum(least)
        place = np.searchsorted(total, generator.random_sample() * total[-1], side="right")
        chosen.append(int(min(place, np.argmax(total))))
        least = np.minimum(least, squared_distances(features, features[chosen[-1:]])[:, 0])
    return features[chosen]


def _lloyd(features: np.ndarray, centroids: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the summed distance and the centroids after Lloyd's iterations; none is empty.

    A centroid without documents moves to the document that is farthest from its own.
    """
    parts = np.full(len(features), -1)
    for _ in range(_ITERATIONS):
        distances = squared_distances(features, centroids)
        nearest = np.argmin(distances, axis=1)
        least = distances[np.arange(len(features)), nearest]
        for empty in np.flatnonzero(np.bincount(nearest, minlength=len(centroids)) == 0):
            is_spare = np.bincount(nearest, minlength=len(centroids))[nearest] > 1
            farthest = int(np.argmax(np.where(is_spare, least, -1.0)))
            nearest[farthest], least[farthest] = empty, 0.0
        if np.array_equal(nearest, parts):
            break
        parts = nearest
        centroids = np.stack(
            [features[parts == part].mean(axis=0) for part in range(len(centroids))]
        )
    return float(np.min(squared_distances(features, centroids), axis=1).sum()), centroids


def _normalize(counts: np.ndarray) -> np.ndarray:
    """Return features [... d] of signed counts; zeros of zeros."""
    damped = np.sign(counts) * np.log1p(np.abs(counts))
    norms = np.sqrt(np.sum(damped**2, axis=-1, keepdims=True))
    return damped / np.where(norms > 0.0, norms, 1.0)


def _hashed_tokens(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return bucket and sign of each token."""
    return _buckets(tokens.astype(np.uint64) * np.uint64(2))


def _hashed_pairs(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return bucket and sign of each pair of adjacent tokens."""
    left = tokens[:-1].astype(np.uint64)
    right = tokens[1:].astype(np.uint64)
    return _buckets((left << np.uint64(32) | right) * np.uint64(2) + np.uint64(1))


def _buckets(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return bucket and sign of 64-bit keys: the finaliser of SplitMix64."""
    keys = keys + np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ keys >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ keys >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    keys = keys ^ keys >> np.uint64(31)
    signs = np.where(keys >> np.uint64(63), 1.0, -1.0)
    return (keys % np.uint64(NUM_BUCKETS)).astype(np.int64), signs


def _hash_of(tokens: np.ndarray) -> int:
    """Return a 64-bit hash of the tokens that are counted, the same for any integer type."""
    content = np.ascontiguousarray(tokens[:MOST_TOKENS].astype("<u4")).data
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


_EMPTY = np.zeros(NUM_BUCKETS)
