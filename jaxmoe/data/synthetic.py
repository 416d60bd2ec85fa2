# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws synthetic languages with exactly known entropy, the floor of any model's loss.

`markov`: the next of V symbols depends on the k before it, p(x_t | x_{t-k}, ..., x_{t-1}). Each
context's distribution is drawn once from a symmetric Dirichlet, plus a floor, so that every symbol
may follow every context and the chain has one stationary distribution. A row starts in that
distribution, hence every window of a row has the same distribution, and the mean cost of the S
predictions of a row of S + 1 tokens is

    (H_j - H_1 + max(0, S + 1 - k) h) / S   bits,   j = min(S + 1, k)

(and (H_k + (S - k) h) / S if no token is given and all S are predicted, as in masked diffusion)
with H_j the entropy of j successive symbols and h the entropy rate. This is the minimum over all
predictors that see the row's own tokens (Cover and Thomas, "Elements of Information Theory", chain
rule and section 4.2).

`language_mixture`: M such languages over disjoint slices of the vocabulary, one language per row,
all equally likely. The first token of a row, which is not predicted, determines the language. The
ideal expert of every token is known; `normalized_mutual_information` measures how well a router
finds it.

Rows are drawn by counter (Philox), keyed by seed, split and index, with numpy's `RandomState`,
whose streams do not change between versions of numpy. The validation rows do not depend on the
seed, so that runs with different seeds are evaluated on the same rows.

To add a language: `jaxmoe/data/synthetic.py` (with its exact entropy),
`tests/jaxmoe/data/test_synthetic.py` (its entropy by brute force).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import math
from typing import Any, ClassVar

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.order import frozen_generator
from jaxmoe.data.source import Row, SourceKind, Split
from jaxmoe.data.subset import PartitionedConfig, RowNumbers, Subset, SubsetConfig
from pallas_kernels.array_types import Float, Int, Shaped

_FLOOR = 0.01
"""Share of every context's distribution that is uniform."""
_LARGEST_TABLE = 2**20
"""Largest number of entries of a transition table; the sampler holds Python floats."""
_SPLIT_KEYS: dict[Split, int] = {"train": 1, "validation": 2}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MarkovConfig(SourceKind):
    """Markov chain of order k, a language with exactly known entropy."""

    name: ClassVar[str] = "markov"

    order: int = 2
    """Number of tokens that the next one depends on, from 1."""
    vocab_size: int = 8
    """Number of symbols, from 2."""
    concentration: float = 0.15
    """Concentration of the Dirichlet of each context's distribution; lower is more predictable."""
    language_seed: int = 0
    """Seed of the language; the training seed selects the rows."""

    def __post_init__(self):
        _check_chain(self, self.vocab_size, "vocab_size")

    def build(self, seed: int = 0) -> SyntheticSource:
        """Draw the language; `seed` selects the rows of the train split."""
        chain = _draw_chain(self, self.vocab_size, language=0)
        return SyntheticSource(config=self, seed=seed, chains=(chain,))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LanguageMixtureConfig(PartitionedConfig):
    """Disjoint languages, one per row: the ideal expert of every token is known."""

    name: ClassVar[str] = "language_mixture"

    num_languages: int = 4
    """Number of languages; the vocabulary has num_languages * symbols_per_language ids."""
    symbols_per_language: int = 8
    """Number of symbols of one language, from 2."""
    order: int = 1
    """Number of tokens that the next one depends on, from 1."""
    concentration: float = 0.3
    """Concentration of the Dirichlet of each context's distribution; lower is more predictable."""
    language_seed: int = 0
    """Seed of the languages; the training seed selects the rows."""

    def __post_init__(self):
        if self.num_languages < 1:
            raise ValueError(f"num_languages={self.num_languages} must be at least 1")
        _check_chain(self, self.symbols_per_language, "symbols_per_language")

    def build(self, seed: int = 0) -> SyntheticSource:
        """Draw the languages; `seed` selects the rows of the train split."""
        chains = tuple(
            _draw_chain(self, self.symbols_per_language, language=language)
            for language in range(self.num_languages)
        )
        source = SyntheticSource(config=self, seed=seed, chains=chains)
        return source if self.partition is None else source.of_subset(self.partition)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MarkovChain:
    """One language: its distributions, and tables to draw from them.

    Contexts are numbered in base V, the oldest symbol first, so that symbol s after context c leads
    to context (c * V + s) mod V**k.
    """

    order: int
    transitions: Float[np.ndarray, "contexts V"]
    stationary: Float[np.ndarray, " contexts"]
    cumulative_transitions: tuple[float, ...]
    cumulative_stationary: tuple[float, ...]

    def entropy_rate(self) -> float:
        """Return the bits per symbol after k known symbols."""
        return float(self.stationary @ _entropy_bits(self.transitions))

    def entropy_bits_per_token(self, sequence_length: int) -> float:
        """Return the mean bits of the S predictions of a row, including those of short contexts."""
        num_first = min(sequence_length + 1, self.order)
        first = self._block_entropy(num_first) - self._block_entropy(1)
        later_bits = max(0, sequence_length + 1 - self.order) * self.entropy_rate()
        return (first + later_bits) / sequence_length

    def whole_row_bits_per_token(self, sequence_length: int) -> float:
        """Return the mean bits of the S symbols of a row if none is given."""
        num_first = min(sequence_length, self.order)
        later_bits = (sequence_length - num_first) * self.entropy_rate()
        return (self._block_entropy(num_first) + later_bits) / sequence_length

    def sample(self, uniforms: Float[np.ndarray, " row"]) -> Int[np.ndarray, " row"]:
        """Return a row of symbols that starts in the stationary distribution.

        Args:
            uniforms: Numbers in [0, 1); the first selects k symbols, number t >= k the t-th symbol.
        """
        contexts, vocab = self.transitions.shape
        context = bisect.bisect_right(self.cumulative_stationary, uniforms[0], 0, contexts - 1)
        symbols = [context // vocab**power % vocab for power in reversed(range(self.order))]
        for uniform in uniforms[self.order :].tolist():
            # The table is flat, so the index found is context * V + symbol.
            low = context * vocab
            index = bisect.bisect_right(self.cumulative_transitions, uniform, low, low + vocab - 1)
            symbols.append(index - low)
            context = index % contexts
        return np.array(symbols[: len(uniforms)], np.int32)

    def _block_entropy(self, length: int) -> float:
        """Return the bits of `length` successive symbols, at most k."""
        vocab = self.transitions.shape[1]
        marginal = self.stationary.reshape(vocab**length, -1).sum(axis=1)
        return float(_entropy_bits(marginal))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SyntheticSource:
    """Rows of one language each, drawn by counter; their text is the token ids."""

    config: MarkovConfig | LanguageMixtureConfig
    seed: int
    chains: tuple[MarkovChain, ...]
    partition: Subset | None = None
    """Part to which the rows of the train split belong, if they are partitioned."""
    part_rows: RowNumbers | None = None
    """Rows of the train split in that part."""

    @property
    def bytes_per_token(self) -> float | None:
        """None: symbols are not bytes, and losses are in bits per token."""
        return None

    @property
    def vocab_size(self) -> int:
        """Number of symbols of all languages."""
        return sum(chain.transitions.shape[1] for chain in self.chains)

    def num_rows(self, split: Split, sequence_length: int) -> None:
        """Return None: rows are unlimited."""
        del split, sequence_length

    def row(self, split: Split, index: int, sequence_length: int, *, epoch: int = 0) -> Row:
        """Return row `index`: its language is drawn first, then S + 1 of its symbols."""
        del epoch
        if split == "train" and self.part_rows is not None:
            index = self.part_rows.number(index, sequence_length)
        seed = self.seed if split == "train" else 0
        return Row(self._draw(split, seed, index, sequence_length))

    def of_subset(self, subset: SubsetConfig) -> SyntheticSource:
        """Return the source whose training rows are those of a subset.

        Args:
            subset: Subset of the rows; the same rows define it for every seed.

        Raises:
            DataError: There are too few different rows.
        """
        partition = subset.of_rows(functools.partial(self._draw, "train", 0))
        rows = partition.rows(functools.partial(self._draw, "train", self.seed))
        return dataclasses.replace(self, partition=partition, part_rows=rows)

    def _draw(
        self, split: Split, seed: int, index: int, sequence_length: int
    ) -> Int[np.ndarray, " row"]:
        generator = frozen_generator(self.config.language_seed, _SPLIT_KEYS[split], seed, index)
        uniforms = generator.random_sample(sequence_length + 2)
        language = int(uniforms[0] * len(self.chains))
        symbols = self.chains[language].sample(uniforms[1:])
        return symbols + np.int32(language * self.chains[0].transitions.shape[1])

    def entropy_bits_per_token(self, sequence_length: int) -> float:
        """Return the exact mean bits per predicted token, the floor of the loss."""
        return float(
            np.mean([chain.entropy_bits_per_token(sequence_length) for chain in self.chains])
        )

    def whole_row_bits_per_token(self, sequence_length: int) -> float:
        """Return the exact mean bits per token of S tokens if none is given.

        This is the floor of the bound of masked diffusion; it includes the bits of the language,
        once per row.
        """
        bits = [chain.whole_row_bits_per_token(sequence_length) for chain in self.chains]
        return float(np.mean(bits)) + math.log2(len(self.chains)) / sequence_length

    def fingerprint(self) -> dict[str, Any]:
        """Return the config, the seed of the rows, and the sha256 of the transition tables."""
        digest = hashlib.sha256()
        for chain in self.chains:
            # Rounded, because the last bit differs between machines.
            digest.update(np.round(chain.transitions * 1e9).astype("<i8").tobytes())
        fields = dataclasses.asdict(self.config)
        fields.pop("partition", None)
        return {
            "kind": self.config.name,
            **fields,
            "seed": self.seed,
            "sha256": digest.hexdigest(),
            **({} if self.partition is None else {"partition": self.partition.fingerprint()}),
        }

    def language_of(self, tokens: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
        """Return the language of each token in [0, M), its ideal expert."""
        return tokens // self.chains[0].transitions.shape[1]

    def describe(self, sequence_length: int) -> str:
        """Return name and exact entropy."""
        floor = self.entropy_bits_per_token(sequence_length)
        part = "" if self.partition is None else f", {self.partition.describe()}"
        return f"{self.config.name}{part}, exact entropy {floor:.4f} bits/token"

    def text(self, split: Split) -> None:
        """Return None: symbols are not text."""
        del split

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the token ids in a text of numbers separated by spaces."""
        token_texts = text.split()
        wrong = [
            word for word in token_texts if not word.isdecimal() or int(word) >= self.vocab_size
        ]
        if wrong:
            raise DataError(
                f"{wrong[0]!r} is not a token of this language: write numbers from 0 to "
                f"{self.vocab_size - 1}, separated by spaces"
            )
        return np.array([int(word) for word in token_texts], np.int32)

    def decode(self, tokens: Int[np.ndarray, " S"]) -> str:
        """Return the token ids as numbers separated by spaces."""
        return " ".join(str(token) for token in np.asarray(tokens).tolist())

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the number, after a space where it is not the first."""
        return f"{'' if is_first else ' '}{token}".encode()


def normalized_mutual_information(counts: Shaped[np.ndarray, "M E"]) -> float:
    """Return the normalized mutual information of languages and experts.

    2 I(language; expert) / (H(language) + H(expert))

    Args:
        counts: Tokens of each language (row) that went to each expert (column).

    Returns:
        0 if language and expert are independent, 1 if each determines the other. With more experts
        than languages it is below 1, unless only as many experts as languages are used. 0 with one
        language and one expert.

    Source: Strehl and Ghosh, "Cluster ensembles" (JMLR 2002), with the arithmetic mean.
    """
    total = counts.sum()
    if total <= 0 or (counts < 0).any():
        raise DataError("counts must not be negative and must hold at least one token")
    joint = counts / total
    language = _entropy_bits(joint.sum(axis=1))
    expert = _entropy_bits(joint.sum(axis=0))
    mutual = language + expert - _entropy_bits(joint.ravel())
    return float(np.clip(2 * mutual / (language + expert), 0, 1)) if language + expert > 0 else 0.0


def _check_chain(
    config: MarkovConfig | LanguageMixtureConfig, num_symbols: int, field: str
) -> None:
    """Raise a ValueError for a chain that cannot be drawn."""
    if config.order < 1:
        raise ValueError(f"order={config.order} must be at least 1")
    if num_symbols < 2:
        raise ValueError(f"{field}={num_symbols} must be at least 2")
    if num_symbols ** (config.order + 1) > _LARGEST_TABLE:
        raise ValueError(
            f"{field}={num_symbols} with order={config.order} needs a table of "
            f"{num_symbols ** (config.order + 1)} probabilities, more than {_LARGEST_TABLE}: "
            "lower one of them"
        )
    if not 0.05 <= config.concentration <= 1000:
        raise ValueError(
            f"concentration={config.concentration} must be between 0.05 (almost deterministic) "
            "and 1000 (almost uniform)"
        )
    if config.language_seed < 0:
        raise ValueError(f"language_seed={config.language_seed} must not be negative")


def _draw_chain(
    config: MarkovConfig | LanguageMixtureConfig, num_symbols: int, *, language: int
) -> MarkovChain:
    """Draw the distributions of all contexts and solve for the stationary one."""
    generator = frozen_generator(config.language_seed, 0, language)
    drawn = generator.dirichlet(
        np.full(num_symbols, config.concentration), size=num_symbols**config.order
    )
    transitions = (1 - _FLOOR) * drawn + _FLOOR / num_symbols
    stationary = _stationary(transitions)
    return MarkovChain(
        order=config.order,
        transitions=transitions,
        stationary=stationary,
        cumulative_transitions=tuple(transitions.cumsum(axis=1).ravel().tolist()),
        cumulative_stationary=tuple(stationary.cumsum().tolist()),
    )


def _stationary(transitions: np.ndarray) -> np.ndarray:
    """Return the stationary distribution of contexts, by power iteration."""
    contexts, vocab = transitions.shape
    current = np.full(contexts, 1 / contexts)
    for _ in range(10_000):
        # The flat index is context * V + symbol; modulo V**k it is the next context.
        following = (current[:, None] * transitions).reshape(vocab, contexts).sum(axis=0)
        following /= following.sum()
        change = np.abs(following - current).sum()
        current = following
        if change < 1e-14:
            return current
    raise DataError(
        f"the stationary distribution did not converge (last change {change:.1e}): raise "
        "concentration, or take another language_seed"
    )


def _entropy_bits(probabilities: np.ndarray) -> np.ndarray | np.floating:
    """Return the entropy over the last axis, with 0 log 0 = 0."""
    logs = np.log2(probabilities, where=probabilities > 0, out=np.zeros_like(probabilities))
    return -(probabilities * logs).sum(axis=-1)
