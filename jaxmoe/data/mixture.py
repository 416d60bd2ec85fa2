# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A weighted mixture of sources: every row comes from one part, in exact proportions.

    --data.mix web=0.7:crawl/ code=0.3:'src/**/*.py'

Row k of the endless sequence belongs to a part that depends on k and the weights alone, at most one
row away from its share at any k (see `order.py`); within a part, rows are those of its epochs, each
shuffled: one with few rows and a large weight is repeated more often than the others. Held out are
rows of each part in the same proportions, none twice, as far as the shortest reaches.

All parts share one tokenizer; a trained one is trained on the train splits of all.

To mix sources that are not files: `Mixture` takes any. All should pack, or none, so that every
batch has the same fields and one compiled step takes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.files import FileReadingConfig, Files
from jaxmoe.data.order import (
    interleaved,
    interleaved_length,
    order_digest,
    shuffled,
    whole_weights,
)
from jaxmoe.data.packed import build_sources
from jaxmoe.data.source import Row, Source, Split
from pallas_kernels.array_types import Int, Shaped

_PART = re.compile(r"(?P<name>[\w.-]+)=(?P<weight>[^:]+):(?P<path>.+)", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig(FileReadingConfig):
    """Several collections of files, each with a weight."""

    name: ClassVar[str] = "mixture"

    mix: tuple[str, ...] = ()
    """Parts, several after each other: NAME=WEIGHT:PATH, a path as in data.path. Weights are shares
    of rows; they need not sum to 1, and 0 leaves a part out."""

    def check(self) -> None:
        """Raises a ValueError for values that cannot be."""
        # Not super(): a class with slots is made twice, and the first is not an ancestor.
        FileReadingConfig.check(self)
        parts = [_part(text) for text in self.mix]
        names = [name for name, _, _ in parts]
        if len(set(names)) < len(names):
            raise ValueError(f"data.mix names a part twice: {', '.join(names)}")
        if parts and not any(weight for _, weight, _ in parts):
            raise ValueError("data.mix: every weight is 0, so that nothing is left")

    def build(self, seed: int = 0) -> Mixture:
        """Reads, tokenises and plans every part.

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
        seed: Of the order of rows within each part.

    Raises:
        DataError: The parts do not share a vocabulary.
    """

    def __init__(self, parts: Mapping[str, tuple[float, Source]], *, seed: int):
        self._names = tuple(parts)
        self._sources = tuple(source for _, source in parts.values())
        self._weights = whole_weights([_checked(name, parts[name][0]) for name in parts])
        self._seed = seed
        if len(sizes := {source.vocab_size for source in self._sources}) > 1:
            raise DataError(
                f"the parts of a mixture must share one tokenizer: {', '.join(parts)} have "
                f"vocabularies of {sorted(sizes)} ids"
            )

    @property
    def parts(self) -> dict[str, Source]:
        """The sources by name."""
        return dict(zip(self._names, self._sources, strict=True))

    @property
    def tokenizer(self) -> Any:
        """Of all parts; None where they have none."""
        return getattr(self._sources[0], "tokenizer", None)

    @property
    def vocab_size(self) -> int:
        """Of all parts."""
        return self._sources[0].vocab_size

    @property
    def bytes_per_token(self) -> float | None:
        """Mean of the parts by weight, exact where their rows are equally full."""
        ratios = [source.bytes_per_token for source in self._sources]
        if None in ratios:
            return None
        products = [w * r for w, r in zip(self._weights, ratios, strict=True) if r is not None]
        return math.fsum(products) / sum(self._weights)

    def num_rows(self, split: Split, sequence_length: int) -> int | None:
        """No end in training; held out, as far as the shortest part reaches."""
        if split == "train":
            return None
        sizes = [source.num_rows(split, sequence_length) for source in self._sources]
        if None in sizes:
            return None
        return interleaved_length([size for size in sizes if size is not None], self._weights)

    def row(self, split: Split, index: int, sequence_length: int, *, epoch: int = 0) -> Row:
        """The row at a place of the endless sequence."""
        del epoch  # parts have their own
        part, place = interleaved(index, self._weights)
        source, repeat = self._sources[part], 0
        size = source.num_rows(split, sequence_length)
        if split == "train" and size is not None:
            if not size:
                raise DataError(
                    f"part {self._names[part]!r} of the mixture has no row of sequence_length="
                    f"{sequence_length}: bring more of it, or lower training.sequence_length"
                )
            seed = _part_seed(self._seed, self._names[part])
            repeat, place = shuffled(place, size=size, seed=seed)
        return source.row(split, place, sequence_length, epoch=repeat)

    def entropy_bits_per_token(self, sequence_length: int) -> float | None:
        """Mean of the parts by weight, where it is known of all."""
        rates = [source.entropy_bits_per_token(sequence_length) for source in self._sources]
        known = [w * r for w, r in zip(self._weights, rates, strict=True) if r is not None]
        return math.fsum(known) / sum(self._weights) if len(known) == len(rates) else None

    def fingerprint(self) -> dict[str, Any]:
        """Weights, order and the parts."""
        parts = zip(self._names, self._weights, self._sources, strict=True)
        return {
            "kind": MixtureConfig.name,
            "order": order_digest(),
            "parts": {name: {"weight": w, **source.fingerprint()} for name, w, source in parts},
        }

    def describe(self, sequence_length: int) -> str:
        """The share of each part, and what it is."""
        total = sum(self._weights)
        parts = zip(self._names, self._weights, self._sources, strict=True)
        return "mixture of " + "; ".join(
            f"{name} {weight / total:.1%} ({source.describe(sequence_length)})"
            for name, weight, source in parts
        )

    def text(self, split: Split) -> Shaped[np.ndarray, " length"] | None:
        """None: one after the other, the parts are not the text that rows are drawn from."""
        del split

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """By the tokenizer of all parts."""
        return self._sources[0].encode(text)

    def decode(self, tokens: Int[np.ndarray, " S"]) -> str:
        """By the tokenizer of all parts."""
        return self._sources[0].decode(tokens)


def _part(text: str) -> tuple[str, float, str]:
    """Name, weight and path of `NAME=WEIGHT:PATH`."""
    match = _PART.fullmatch(text)
    if match is None:
        raise ValueError(f"data.mix has {text!r}: write a part as NAME=WEIGHT:PATH, web=0.7:crawl/")
    try:
        weight = float(match["weight"])
    except ValueError:
        weight = math.nan
    return match["name"], _checked(match["name"], weight, match["weight"]), match["path"]


def _checked(name: str, weight: float, spelled: str | None = None) -> float:
    """A weight that can be used."""
    if not (math.isfinite(weight) and weight >= 0):
        raise DataError(
            f"data.mix: the weight of {name} is {spelled or weight}, which must be a number, 0 "
            "(absent) or above"
        )
    return weight


def _part_seed(seed: int, name: str) -> int:
    """The seed of a part, so that two parts of equal size are not in step."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
