# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ensembles: mixtures against sums of probabilities, causal routing, equal and single members."""

import math

import numpy as np
import pytest

from jaxmoe.contrib.ensembles.clusters import Clusters, document_features
from jaxmoe.contrib.ensembles.evaluate import TEMPERATURES, evaluate_ensemble
from jaxmoe.contrib.ensembles.members import EnsembleMember, EnsembleMembers
from jaxmoe.contrib.ensembles.mixture import (
    ensemble_nll,
    member_log_weights,
    part_distances,
    part_log_probs,
)
from jaxmoe.contrib.ensembles.partition import Partition
from jaxmoe.data import Batch

PARTS, LENGTH, ROWS = 3, 12, 4
VOCABULARY = np.arange(30).reshape(PARTS, 10)


def rows_of(languages, seed=0):
    """Rows over the ids of one part each."""
    random = np.random.default_rng(seed)
    return np.stack([random.choice(VOCABULARY[part], LENGTH + 1) for part in languages])


def batch_of(rows, segment_ids=None):
    weights = np.random.default_rng(3).integers(0, 2, (len(rows), LENGTH)).astype(np.float32)
    weights[:, -1] = 1.0
    return Batch(
        tokens=rows[:, :-1].astype(np.int32),
        targets=rows[:, 1:].astype(np.int32),
        loss_weights=weights,
        segment_ids=segment_ids,
    )


def clusters(num_parts=PARTS):
    features = [
        np.mean([document_features(row) for row in rows_of([part] * 8, seed=part)], axis=0)
        for part in range(num_parts)
    ]
    return Clusters(centroids=np.stack(features))


def routed(batch, parts, *, top, temperature, centroids):
    distances, is_empty = part_distances(batch, centroids)
    return member_log_weights(part_log_probs(distances, is_empty, temperature), parts, top)


def oracle(nll, row, parts, top, temperature, centroids):
    """Nll of each target of a row under the mixture, one token at a time."""
    found = []
    for place in range(LENGTH):
        features = document_features(row[: place + 1])
        closeness = [
            math.exp(-sum((features - centroid) ** 2) / temperature) for centroid in centroids
        ]
        share = [closeness[part] / parts.count(part) for part in parts]
        used = sorted(range(len(parts)), key=lambda member: -share[member])[:top]
        total = sum(share[member] for member in used)
        mixed = sum(share[m] / total * math.exp(-nll[place, m]) for m in used)
        found.append(-math.log(mixed))
    return np.array(found)


@pytest.mark.parametrize("parts", [(0, 1, 2), (2, 0), (1, 1, 0, 2)])
@pytest.mark.parametrize("top", [1, 2, 9])
def test_the_mixture_equals_sums_of_probabilities(parts, top):
    rows, centroids = rows_of([0, 1, 2, 0]), clusters().centroids
    nll = np.random.default_rng(1).uniform(0.1, 6.0, (ROWS, LENGTH, len(parts)))
    weights = routed(batch_of(rows), parts, top=top, temperature=0.3, centroids=centroids)
    mixed = ensemble_nll(nll, weights)
    for number, row in enumerate(rows):
        expected = oracle(nll[number], row[:-1], list(parts), top, 0.3, centroids)
        np.testing.assert_allclose(mixed[number], expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(np.exp(weights).sum(-1), 1.0, rtol=0, atol=1e-12)
    assert ((weights > -np.inf).sum(-1) == min(top, len(parts))).all()


def test_later_tokens_do_not_change_the_router():
    rows, centroids = rows_of([0, 1]), clusters().centroids
    given = {"top": 2, "temperature": 0.1, "centroids": centroids}
    before = routed(batch_of(rows), (0, 1, 2), **given)
    for place in (1, 5, LENGTH - 1):
        changed = rows.copy()
        changed[:, place] = VOCABULARY[2][:2]
        after = routed(batch_of(changed), (0, 1, 2), **given)
        np.testing.assert_array_equal(after[:, :place], before[:, :place])
        assert not np.array_equal(after[:, place:], before[:, place:])


def test_a_document_is_routed_without_its_neighbours_in_the_row():
    rows, centroids = rows_of([0, 1]), clusters().centroids
    rows[0, 6:] = rows[1, : LENGTH - 5]
    segments = np.repeat([[1, 2]], [6, LENGTH - 6], axis=1).astype(np.int32)
    packed, _ = part_distances(batch_of(rows[:1], segments), centroids)
    alone, _ = part_distances(batch_of(rows[1:]), centroids)
    np.testing.assert_allclose(packed[0, 6:], alone[0, : LENGTH - 6], rtol=0, atol=1e-12)


def test_a_prefix_without_n_grams_is_uniform():
    distances = np.array([[0.1, 1.9], [0.1, 1.9]])
    log_probs = part_log_probs(distances, np.array([True, False]), 0.01)
    np.testing.assert_allclose(log_probs[0], -math.log(2), rtol=1e-12)
    assert log_probs[1, 0] > -1e-9 and np.isfinite(log_probs).all()


def members_of(parts, nll, rows, num_parts=PARTS):
    """Members with given losses [batches B S R] of batches of these rows."""
    known = clusters(num_parts)
    return EnsembleMembers(
        members=tuple(
            EnsembleMember(
                path=f"run{number}",
                step=1,
                partition=Partition(part=part, clusters=known),
                nll=nll[..., number],
            )
            for number, part in enumerate(parts)
        ),
        batches=tuple(batch_of(batch) for batch in rows),
        bytes_per_token=None,
        entropy_floor=None,
    )


def batches_of_rows(count):
    return [rows_of([number % PARTS for number in range(ROWS)], seed=n) for n in range(count)]


@pytest.mark.parametrize("top", [1, 2])
def test_equal_members_and_equal_parts_give_the_loss_of_the_member(top):
    rows = batches_of_rows(2)
    one = np.random.default_rng(2).uniform(0.1, 5.0, (2, ROWS, LENGTH, 1))
    for parts in ((0, 1, 2), (1, 1), (0,)):
        nll = np.repeat(one, len(parts), axis=-1)
        result = evaluate_ensemble(members_of(parts, nll, rows), top=top, temperature=0.2)
        assert result.routed_bits == pytest.approx(result.member_bits[0], abs=1e-12)
        assert result.uniform_bits == pytest.approx(result.member_bits[0], abs=1e-12)
    single = members_of((0,), one, rows, num_parts=1)
    assert single.clusters.num_parts == 1
    result = evaluate_ensemble(single, top=top, temperature=0.2)
    assert result.routed_bits == pytest.approx(result.member_bits[0], abs=1e-12)


def test_the_temperature_is_chosen_on_batches_that_are_not_scored():
    """Each member is good on its own part, in the scored batches; the last one says otherwise."""
    rows = batches_of_rows(4)
    own = np.stack([np.stack([row // 10 for row in batch[:, 1:]]) for batch in rows])
    nll = np.where(own[..., None] == np.arange(PARTS), 0.5, 8.0)
    good = evaluate_ensemble(members_of((0, 1, 2), nll, rows), top=3)
    assert (good.num_scored, good.num_calibration) == (3, 1)
    assert good.temperature in TEMPERATURES and good.temperature < 0.2
    assert good.routed_bits < good.uniform_bits < min(good.member_bits)
    spoilt = nll.copy()
    spoilt[3] = 8.5 - nll[3]
    other = evaluate_ensemble(members_of((0, 1, 2), spoilt, rows), top=3)
    assert other.temperature == max(TEMPERATURES)
    assert other.member_bits == good.member_bits
    assert other.routed_bits > good.routed_bits
    given = evaluate_ensemble(members_of((0, 1, 2), nll, rows), top=3, temperature=0.1)
    assert (given.num_scored, given.num_calibration) == (4, 0)


def test_weights_and_positions_are_means_over_scored_tokens():
    rows = batches_of_rows(2)
    nll = np.random.default_rng(5).uniform(0.1, 5.0, (2, ROWS, LENGTH, 2))
    members = members_of((0, 1), nll, rows)
    result = evaluate_ensemble(members, top=2, temperature=0.3)
    weights = np.stack([batch.loss_weights for batch in members.batches])
    for number in range(2):
        expected = (nll[..., number] * weights).sum() / weights.sum() / math.log(2)
        assert result.member_bits[number] == pytest.approx(expected, rel=1e-12)
    assert sum(result.member_weights) == pytest.approx(1.0)
    assert result.num_tokens == weights.sum()
    assert [(each.first, each.last) for each in result.positions] == [
        (0, 0),
        (1, 2),
        (3, 6),
        (7, 11),
    ]
    counts = [weights[..., each.first : each.last + 1].sum() for each in result.positions]
    mean = np.dot([each.routed for each in result.positions], counts) / sum(counts)
    assert mean == pytest.approx(result.routed_bits, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top": 0}, "top=0 must be at least 1: the members that are used per token"),
        ({"temperature": 0.0}, "temperature=0.0 must be a number above 0"),
        ({"temperature": math.nan}, "temperature=nan must be a number above 0"),
        (
            {},
            "the temperature is chosen on held-out batches that are not scored, and there is one"
            " batch: give --temperature, or --batches 2 or more",
        ),
    ],
)
def test_routers_that_cannot_be_built_are_refused(given, message):
    members = members_of((0,), np.ones((1, ROWS, LENGTH, 1)), batches_of_rows(1))
    with pytest.raises(ValueError) as refused:
        evaluate_ensemble(members, **given)
    assert str(refused.value) == message
