# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixes sources by weight: every row comes from one part, in exact proportions.

    --data.mix web=0.7:crawl/ code=0.3:'src/**/*.py'

The part of row k of the endless sequence depends on k and the weights alone, and is at most one row
away from its share at any k (see `order.py`). Rows within a part are those of its shuffled epochs:
a part with few rows and a large weight is repeated more often. The validation split has rows of
each part in the same proportions, none twice, until a part is exhausted.

All parts share one tokenizer; it is trained, if at all, on the train splits of all parts.

`Mixture` also mixes sources that do not read files. Either all parts or none should be packed, so
that every batch has the same fields and one compiled step takes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxmoe import combinations
from jaxmoe.data.batch import DataError
from jaxmoe.data.files import FileReadingConfig, Files
from jaxmoe.data.order import (
    interleave,
    interleaved_length,
    order_digest,
    shuffle_place,
    whole_weights,
)
from jaxmoe.data.packed import build_sources
from jaxmoe.data.source import Row, Source, SourceTraits, Split, token_bytes
from pallas_kernels.array_types import Int, Shaped

_PART = re.compile(r"(?P<name>[\w.-]+)=(?P<weight>[^:]+):(?P<path>.+)", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig(FileReadingConfig):
    """Several collections of files, each with a weight."""

    name: ClassVar[str] = "mixture"

    mix: tuple[str, ...] = ()
    """Parts, separated by spaces: NAME=WEIGHT:PATH, a path as in data.path. Weights are shares of
    rows; they need not sum to 1, and 0 leaves a part out."""

    def __post_init__(self):
        # Not super(): a dataclass with slots is created twice, and the first is not an ancestor.
        FileReadingConfig.__post_init__(self)
        combinations.check(data=self)
        parts = [_part(text) for text in self.mix]
        names = [name for name, _, _ in parts]
        if len(set(names)) < len(names):
            raise ValueError(f"data.mix names a part twice: {', '.join(names)}")
        if parts and not any(weight for _, weight, _ in parts):
            raise ValueError("data.mix: every weight is 0: give at least one a weight above 0")

    @property
    def traits(self) -> SourceTraits:
        """Properties that the rest of the library depends on; tasks are parts with a weight."""
        names = tuple(name for name, weight, _ in map(_part, self.mix) if weight)
        return dataclasses.replace(super(MixtureConfig, self).traits, task_names=names)

    def build(self, seed: int = 0) -> Mixture:
        """Read, tokenise and plan every part.

        Raises:
            DataError: A path, a file or a record cannot be used.
        """
        parts = [(name, weight, path) for name, weight, path in map(_part, self.mix) if weight]
        if not parts:
            raise DataError("data.mix is empty: give parts as NAME=WEIGHT:PATH after it")
        collections = {name: Files((path,), self, "data.mix") for name, _, path in parts}
        sources = build_sources(self, "files", collections, seed=seed)
        return Mixture({name: (weight, sources[name]) for name, weight, _ in parts}, seed=seed)


class Mixture:
    """Rows of several sources in exact proportions.

    Args:
        parts: Weight, above 0, and source of each part, by name.
        seed: Seed of the order of rows within each part.
        has_tasks: Whether rows have the number of their part.

    Raises:
        DataError: The parts do not share a vocabulary.
    """

    def __init__(
        self, parts: Mapping[str, tuple[float, Source]], *, seed: int, has_tasks: bool = False
    ):
        self._given = parts
        self._has_tasks = has_tasks
        self._names = tuple(parts)
        self._sources = tuple(source for _, source in parts.values())
        self._weights = whole_weights([_check(name, parts[name][0]) for name in parts])
        self._seed = seed
        if len(sizes := {source.vocab_size for source in self._sources}) > 1:
            raise DataError(
                f"the parts of a mixture must share one tokenizer: {', '.join(parts)} have "
                f"vocabularies of {sorted(sizes)} ids"
            )

    def with_tasks(self) -> Mixture:
        """Return the same rows with the number of their part, in the order of the parts."""
        return Mixture(self._given, seed=self._seed, has_tasks=True)

    @property
    def parts(self) -> dict[str, Source]:
        """Sources by name."""
        return dict(zip(self._names, self._sources, strict=True))

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of all parts, if any."""
        return getattr(self._sources[0], "tokenizer", None)

    @property
    def vocab_size(self) -> int:
        """Vocabulary of all parts."""
        return self._sources[0].vocab_size

    @property
    def bytes_per_token(self) -> float | None:
        """Mean of the parts by weight, exact if their rows are equally full."""
        ratios = [source.bytes_per_token for source in self._sources]
        if None in ratios:
            return None
        products = [w * r for w, r in zip(self._weights, ratios, strict=True) if r is not None]
        return math.fsum(products) / sum(self._weights)

    def num_rows(self, split: Split, sequence_length: int) -> int | None:
        """Return None (unlimited) for training; for validation, until a part is exhausted."""
        if split == "train":
            return None
        sizes = [source.num_rows(split, sequence_length) for source in self._sources]
        if None in sizes:
            return None
        return interleaved_length([size for size in sizes if size is not None], self._weights)

    def row(self, split: Split, index: int, sequence_length: int, *, epoch: int = 0) -> Row:
        """Return the row at a place of the endless sequence."""
        del epoch  # parts have epochs of their own
        part, place = interleave(index, self._weights)
        source = self._sources[part]
        repeat = 0
        size = source.num_rows(split, sequence_length)
        if split == "train" and size is not None:
            if not size:
                raise DataError(
                    f"part {self._names[part]!r} of the mixture has no row of sequence_length="
                    f"{sequence_length}: bring more of it, or lower training.sequence_length"
                )
            seed = _part_seed(self._seed, self._names[part])
            repeat, place = shuffle_place(place, size=size, seed=seed)
        row = source.row(split, place, sequence_length, epoch=repeat)
        return dataclasses.replace(row, task=part) if self._has_tasks else row

    def entropy_bits_per_token(self, sequence_length: int) -> float | None:
        """Return the mean of the parts by weight, None if one is unknown."""
        rates = [source.entropy_bits_per_token(sequence_length) for source in self._sources]
        weighted_rates = [w * r for w, r in zip(self._weights, rates, strict=True) if r is not None]
        return (
            math.fsum(weighted_rates) / sum(self._weights)
            if len(weighted_rates) == len(rates)
            else None
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return the weights, the order, and the fingerprints of the parts."""
        parts = zip(self._names, self._weights, self._sources, strict=True)
        return {
            "kind": MixtureConfig.name,
            "order": order_digest(),
            "parts": {name: {"weight": w, **source.fingerprint()} for name, w, source in parts},
        }

    def describe(self, sequence_length: int) -> str:
        """Return share and description of each part."""
        total = sum(self._weights)
        parts = zip(self._names, self._weights, self._sources, strict=True)
        return "mixture of " + "; ".join(
            f"{name} {weight / total:.1%} ({source.describe(sequence_length)})"
            for name, weight, source in parts
        )

    def text(self, split: Split) -> Shaped[np.ndarray, " length"] | None:
        """Return None: the parts end to end are not the text of the rows."""
        del split

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the ids of a text, by the tokenizer of all parts."""
        return self._sources[0].encode(text)

    def decode(self, tokens: Int[np.ndarray, " S"]) -> str:
        """Return the text of ids, by the tokenizer of all parts."""
        return self._sources[0].decode(tokens)

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text; see `jaxmoe.data.source.token_bytes`."""
        return token_bytes(self._sources[0], token, is_first=is_first)


def _part(text: str) -> tuple[str, float, str]:
    """Return name, weight and path of `NAME=WEIGHT:PATH`."""
    match = _PART.fullmatch(text)
    if match is None:
        raise ValueError(f"data.mix has {text!r}: write a part as NAME=WEIGHT:PATH, web=0.7:crawl/")
    try:
        weight = float(match["weight"])
    except ValueError:
        weight = math.nan
    return match["name"], _check(match["name"], weight, match["weight"]), match["path"]


def _check(name: str, weight: float, spelled: str | None = None) -> float:
    """Return a weight, or raise if it is not a number of at least 0."""
    if not (math.isfinite(weight) and weight >= 0):
        raise DataError(
            f"data.mix: the weight of {name} is {spelled or weight}, which must be a number, 0 "
            "(absent) or above"
        )
    return weight


def _part_seed(seed: int, name: str) -> int:
    """Return the seed of a part; parts of equal size are shuffled differently."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def tasks_of(source: Source, num_tasks: int, name: str) -> Source:
    """Return a mixture whose rows have the number of their part; another source as it is.

    Args:
        source: Source of the rows.
        num_tasks: Number of tasks of the adapter.
        name: Name of the adapter.

    Raises:
        DataError: The mixture has more parts.
    """
    if not isinstance(source, Mixture):
        return source
    if (parts := len(source.parts)) > num_tasks:
        raise DataError(
            f"data.mix has {parts} parts, and adapter:{name} has {num_tasks} tasks, one for each"
            f" part: set the adapter's number of tasks to {parts}"
        )
    return source.with_tasks()
