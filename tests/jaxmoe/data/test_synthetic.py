# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Synthetic languages: the entropy is exact, and rows follow the declared distribution."""

import itertools
import json
import re

import numpy as np
import pytest

from jaxmoe.data import (
    DATA_SOURCES,
    DataError,
    LanguageMixtureConfig,
    MarkovConfig,
    normalized_mutual_information,
)

GOLDEN_ROW = [4, 3, 3, 6, 2, 5, 3, 1]
GOLDEN_ENTROPY = 1.4230041800671303


def _stationary_by_linear_solve(chain):
    """Solves pi P = pi, sum(pi) = 1, from the full matrix over contexts."""
    contexts, vocab = chain.transitions.shape
    matrix = np.zeros((contexts, contexts))
    for context in range(contexts):
        for symbol in range(vocab):
            matrix[context, (context * vocab + symbol) % contexts] += chain.transitions[
                context, symbol
            ]
    equations = np.vstack([matrix.T - np.eye(contexts), np.ones((1, contexts))])
    wanted = np.zeros(contexts + 1)
    wanted[-1] = 1
    return np.linalg.lstsq(equations, wanted, rcond=None)[0]


def _sequence_probabilities(chain, length):
    """Probability of every sequence of so many symbols, by enumeration."""
    contexts, vocab = chain.transitions.shape
    stationary = _stationary_by_linear_solve(chain)
    longest = max(length, chain.order)
    probabilities = {}
    for sequence in itertools.product(range(vocab), repeat=longest):
        context = 0
        for symbol in sequence[: chain.order]:
            context = context * vocab + symbol
        probability = stationary[context]
        for symbol in sequence[chain.order :]:
            probability *= chain.transitions[context, symbol]
            context = (context * vocab + symbol) % contexts
        start = sequence[:length]
        probabilities[start] = probabilities.get(start, 0) + probability
    return probabilities


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("sequence_length", [1, 2, 3, 5])
def test_entropy_equals_enumeration(order, sequence_length):
    source = MarkovConfig(order=order, vocab_size=3, language_seed=order).build(0)
    (chain,) = source.chains
    sequences = _sequence_probabilities(chain, sequence_length + 1)
    np.testing.assert_allclose(sum(sequences.values()), 1, rtol=1e-12)
    first = _sequence_probabilities(chain, 1)
    # The row's first symbol is given, the others are predicted.
    bits = -sum(p * np.log2(p / first[s[:1]]) for s, p in sequences.items())
    np.testing.assert_allclose(
        source.entropy_bits_per_token(sequence_length), bits / sequence_length, rtol=1e-11
    )
    # None is given: all symbols of a row are predicted.
    bits = -sum(p * np.log2(p) for p in _sequence_probabilities(chain, sequence_length).values())
    np.testing.assert_allclose(
        source.whole_row_bits_per_token(sequence_length), bits / sequence_length, rtol=1e-11
    )


@pytest.mark.parametrize("config", [MarkovConfig(), MarkovConfig(order=3, vocab_size=6)])
def test_stationary_distribution(config):
    (chain,) = config.build(0).chains
    np.testing.assert_allclose(chain.transitions.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(
        chain.stationary, _stationary_by_linear_solve(chain), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("split", ["train", "validation"])
def test_sampled_rows_follow_the_distribution(split):
    config = MarkovConfig(order=2, vocab_size=4)
    source = config.build(5)
    (chain,) = source.chains
    length, num_rows = 16, 4000
    rows = np.stack([source.row(split, i, length).tokens for i in range(num_rows)])
    assert rows.dtype == np.int32 and rows.shape == (num_rows, length + 1)

    # Every window of a row has the stationary law: all triples, and the first ones alone.
    law = chain.stationary[:, None] * chain.transitions
    for starts in (range(length - 1), [0]):
        counts = np.zeros((16, 4))
        for start in starts:
            np.add.at(counts, (rows[:, start] * 4 + rows[:, start + 1], rows[:, start + 2]), 1)
        frequencies = counts / counts.sum()
        assert np.abs(frequencies - law).max() < 4.5 * np.sqrt(law.max() / num_rows)

    # The cost of the rows under the true law is the entropy, within four standard errors.
    contexts = rows[:, :-2] * 4 + rows[:, 1:-1]
    pairs = chain.stationary.reshape(4, 4)
    second = -np.log2((pairs / pairs.sum(axis=1, keepdims=True))[rows[:, 0], rows[:, 1]])
    bits = second - np.log2(chain.transitions[contexts, rows[:, 2:]]).sum(axis=1)
    error = bits.std() / np.sqrt(num_rows) / length
    assert abs(bits.mean() / length - source.entropy_bits_per_token(length)) < 4 * error
    assert error < 0.01


@pytest.mark.parametrize("config", [MarkovConfig(), LanguageMixtureConfig()])
def test_rows_are_a_function_of_seed_split_and_index(config):
    source = config.build(1)
    row = source.row("train", 7, 32).tokens
    np.testing.assert_array_equal(row, config.build(1).row("train", 7, 32).tokens)
    assert len(np.unique([source.row("train", i, 32).tokens for i in range(20)], axis=0)) == 20
    for other in (
        source.row("validation", 7, 32).tokens,
        config.build(2).row("train", 7, 32).tokens,
    ):
        assert (row != other).any()
    # Runs with different seeds are measured on the same rows.
    np.testing.assert_array_equal(
        source.row("validation", 7, 32).tokens, config.build(2).row("validation", 7, 32).tokens
    )
    assert source.num_rows("train", 32) is None


def test_synthetic_rows_equal_golden_values():
    # Numbers of papers and golden losses hang on these: they may never change.
    np.testing.assert_array_equal(MarkovConfig().build(0).row("train", 0, 7).tokens, GOLDEN_ROW)
    np.testing.assert_allclose(
        MarkovConfig().build(0).entropy_bits_per_token(64), GOLDEN_ENTROPY, rtol=1e-9
    )


def test_language_seed_selects_the_language():
    one, other = MarkovConfig().build(0), MarkovConfig(language_seed=1).build(0)
    assert one.fingerprint()["sha256"] != other.fingerprint()["sha256"]
    assert one.fingerprint()["sha256"] == MarkovConfig().build(9).fingerprint()["sha256"]


def test_language_mixture_has_one_language_per_row_and_uses_all():
    config = LanguageMixtureConfig(num_languages=3, symbols_per_language=5)
    source = config.build(0)
    assert source.vocab_size == 15
    spoken = []
    for index in range(300):
        languages = source.language_of(source.row("train", index, 12).tokens)
        assert (languages == languages[0]).all()
        spoken.append(int(languages[0]))
    counts = np.bincount(spoken, minlength=3)
    assert counts.min() > 70 and counts.sum() == 300
    tables = [chain.transitions for chain in source.chains]
    assert np.abs(tables[0] - tables[1]).max() > 0.1
    each = [chain.entropy_bits_per_token(12) for chain in source.chains]
    np.testing.assert_allclose(source.entropy_bits_per_token(12), sum(each) / 3)


@pytest.mark.parametrize("name", ["markov", "language_mixture"])
def test_synthetic_text_and_fingerprint(name):
    source = DATA_SOURCES[name]().build(0)
    tokens = source.row("train", 0, 9).tokens
    np.testing.assert_array_equal(source.encode(source.decode(tokens)), tokens)
    fingerprint = source.fingerprint()
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    assert fingerprint["kind"] == name
    assert source.bytes_per_token is None
    for wrong in ("3 x", f"{source.vocab_size}", "-1"):
        with pytest.raises(DataError, match="is not a token of this language: write numbers from"):
            source.encode(wrong)


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        (np.eye(4), 1),
        (np.eye(4)[:, [2, 0, 3, 1]] * 7, 1),
        (np.ones((4, 8)), 0),
        (np.ones((1, 1)), 0),
        # Two of four languages share each expert: I = 1 bit, entropies 2 and 1 bit.
        (np.array([[1, 0], [1, 0], [0, 1], [0, 1]]), 2 / 3),
        # H(language) = 1, H(expert) = 1, I = 1 - h(1/4).
        (np.array([[3, 1], [1, 3]]), 1 + 0.75 * np.log2(0.75) + 0.25 * np.log2(0.25)),
    ],
)
def test_normalized_mutual_information(counts, wanted):
    np.testing.assert_allclose(normalized_mutual_information(counts), wanted, atol=1e-12)


def test_normalized_mutual_information_refuses_empty_and_negative_counts():
    for counts in (np.zeros((2, 2)), np.array([[2, -1], [1, 1]])):
        with pytest.raises(DataError, match="must not be negative and must hold at least one"):
            normalized_mutual_information(counts)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (MarkovConfig, {"order": 0}, "order=0 must be at least 1"),
        (MarkovConfig, {"vocab_size": 1}, "vocab_size=1 must be at least 2"),
        (
            MarkovConfig,
            {"vocab_size": 256, "order": 3},
            "vocab_size=256 with order=3 needs a table of 4294967296 probabilities, more than "
            "1048576: lower one of them",
        ),
        (
            MarkovConfig,
            {"concentration": 0.0},
            "concentration=0.0 must be between 0.05 (almost deterministic) and 1000 (almost",
        ),
        (MarkovConfig, {"concentration": float("nan")}, "concentration=nan must be between"),
        (MarkovConfig, {"language_seed": -1}, "language_seed=-1 must not be negative"),
        (LanguageMixtureConfig, {"num_languages": 0}, "num_languages=0 must be at least 1"),
        (
            LanguageMixtureConfig,
            {"symbols_per_language": 1},
            "symbols_per_language=1 must be at least 2",
        ),
    ],
)
def test_invalid_languages_are_refused(config, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**fields)


def test_configs_are_hashable_and_named():
    assert list(DATA_SOURCES) == [
        "corpus",
        "files",
        "mixture",
        "huggingface",
        "chat",
        "markov",
        "language_mixture",
        "tokenizer_only",
    ]
    for name, config in DATA_SOURCES.items():
        assert config.name == name
        assert hash(config()) == hash(config())
