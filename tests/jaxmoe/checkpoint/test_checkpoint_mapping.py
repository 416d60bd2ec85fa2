# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The mapping language: every rule against numpy, every misfit in words."""

import numpy as np
import pytest

from jaxmoe.checkpoint import CheckpointError
from jaxmoe.checkpoint.mapping import parse_mapping, plan_mapping


def _build(text, arrays):
    plan = plan_mapping(parse_mapping(text), arrays)
    return {target: merged.build(arrays.__getitem__, target) for target, merged in plan.items()}


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_names_alone():
    arrays = {"model/layers/3/wq": _random(2, 2), "model/head": _random(3)}
    text = "model/layers/{i}/wq -> layers/{i}/attention/q\nmodel/{rest...} -> {rest...}"
    with pytest.raises(CheckpointError, match="model/layers/3/wq: matches 'model/layers"):
        _build(text, arrays)
    built = _build(text.replace("model/{rest...}", "model/{rest}"), arrays)
    assert set(built) == {"layers/3/attention/q", "head"}
    assert built["head"] is arrays["model/head"]


def test_pieces_in_the_order_of_their_numbers():
    whole = _random(4, 24)
    arrays = {f"rank{r}/w": piece for r, piece in enumerate(np.split(whole, 12, axis=1))}
    built = _build("rank{r}/w -> w : concatenate 1", arrays)
    np.testing.assert_array_equal(built["w"], whole)


def test_parts_of_a_fused_matrix():
    """Each rank holds its half of q, then of k, then of v."""
    q, k, v = (_random(4, 6, seed=seed) for seed in range(3))
    arrays = {
        f"rank{r}/qkv": np.concatenate([np.split(x, 2, 1)[r] for x in (q, k, v)], axis=1)
        for r in range(2)
    }
    built = _build("rank{r}/qkv -> qkv : parts 1 of 3", arrays)
    np.testing.assert_array_equal(built["qkv"], np.concatenate([q, k, v], axis=1))


def test_padding_is_taken_off():
    table = _random(10, 3)
    padded = np.concatenate([table, np.zeros((6, 3), np.float32)])
    arrays = dict(zip(("rank0/e", "rank1/e"), np.split(padded, 2), strict=True))
    built = _build("rank{r}/e -> e : unpadded 0 to 10", arrays)
    np.testing.assert_array_equal(built["e"], table)
    with pytest.raises(CheckpointError, match="axis 0 has 16, of which 20 cannot be kept: rank0/e"):
        _build("rank{r}/e -> e : unpadded 0 to 20", arrays)


def test_replicas_must_be_equal_and_averages_need_not():
    one, other = _random(3), _random(3, seed=1)
    arrays = {"rank0/n": one, "rank1/n": one.copy()}
    np.testing.assert_array_equal(_build("rank{r}/n -> n : replicated", arrays)["n"], one)
    arrays["rank1/n"] = other
    with pytest.raises(
        CheckpointError, match="^n, by the rule .*: the pieces are not equal: rank0"
    ):
        _build("rank{r}/n -> n : replicated", arrays)
    mean = _build("rank{r}/n -> n : average", arrays)["n"]
    np.testing.assert_allclose(mean, (one + other) / 2, rtol=1e-6)


def test_everything_wrong_is_said_at_once():
    arrays = dict.fromkeys(("a/w", "a/x", "b/w", "c"), np.zeros(1))
    text = "# names\n{part}/w -> w\na/{n} -> {n} : average\nd -> d"
    with pytest.raises(CheckpointError) as error:
        _build(text, arrays)
    assert str(error.value) == (
        "the mapping does not fit (3 places):\n"
        "  a/w: matches '{part}/w -> w' and 'a/{n} -> {n} : average'\n"
        "  c: matches no rule\n"
        "  the rule 'd -> d' matches nothing"
    )
    assert set(_build("{p}/w -> {p}\na/x -> x\nc -> : dropped", arrays)) == {"a", "b", "x"}
    with pytest.raises(CheckpointError, match=r"w: has 2 pieces \(a/w, b/w\) and no merge"):
        _build("{p}/w -> w\na/x -> x\nc -> c", arrays)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a b c", "line 1 of the mapping is no rule: 'a b c'; write source -> target"),
        ("a -> {i}", "the target has {i}, which the source has not"),
        ("a ->", "what is dropped has no target, and everything else has one"),
        ("a -> b : concat 1", "'concat 1' is no merge: did you mean 'concatenate'? There are"),
    ],
)
def test_lines_that_are_no_rule(line, message):
    with pytest.raises(CheckpointError) as error:
        parse_mapping(line)
    assert message in str(error.value)
