# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SwitchLoRA: a swap leaves the sum of weight and addition, its moments, its pauses, its rate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxmoe import combinations
from jaxmoe.adapters import StepGiven, SwitchLoraConfig, TargetsConfig, fold_adapters
from jaxmoe.execution import ExecutionConfig
from jaxmoe.optim import adamw
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import init_state
from tests.support.models import TINY

ROLES = ("attention_in", "attention_out", "expert_in")
CONFIG = SwitchLoraConfig(
    rank=4, expert_rank=2, candidates=5, rate=1.0, steps=10**9, targets=TargetsConfig(roles=ROLES)
)


def flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def begun(config):
    """A state with random numbers in place of all zeros of factors and moments."""
    state = init_state(dataclasses.replace(TINY, adapter=config), adamw(1e-2), jax.random.key(0))
    rng = np.random.default_rng(0)
    noise = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)  # noqa: E731
    params = {
        path: noise(x) if path.endswith(":up") else x for path, x in flat(state.params).items()
    }
    moments = jax.tree.map(lambda x: noise(x) if x.ndim else x, state.opt_state)
    params = traverse_util.unflatten_dict(params, sep="/")
    return dataclasses.replace(state, params=params, opt_state=moments)


@functools.cache
def program(config):
    table = parameter_table(dataclasses.replace(TINY, adapter=config))

    def run(state, before):
        state = dataclasses.replace(state, step=state.step + 1)
        given = StepGiven(before, table, ExecutionConfig().placement)
        return config.after_step(state, None, given)

    return jax.jit(run)


def followed(config, state, before=None):
    return program(config)(state, state if before is None else before)


def test_a_swap_leaves_the_effective_weight():
    state = begun(CONFIG)
    after = followed(CONFIG, state)
    old, new = flat(fold_adapters(state.params)), flat(fold_adapters(after.params))
    for path in old:
        largest = float(jnp.abs(old[path]).max())
        np.testing.assert_allclose(new[path], old[path], rtol=0.0, atol=1e-6 * largest)
    changed = [
        path
        for path, value in flat(after.params).items()
        if np.any(np.asarray(value != flat(state.params)[path]))
    ]
    adapted = [path.removesuffix(":up") for path in old | flat(state.params) if ":up" in path]
    assert set(changed) == {f"{path}{end}" for path in adapted for end in ("", ":down", ":up")}


def test_candidates_have_the_deviations_of_the_paper():
    """A has ((sqrt(out) r) / in^1.5)^(1/4), and B (r / sqrt(in out))^(1/4)."""
    config = dataclasses.replace(CONFIG, candidates=2000)
    model = dataclasses.replace(TINY, adapter=config)
    table = parameter_table(model)
    shapes = {row.path: jax.ShapeDtypeStruct(row.shape, jnp.float32) for row in table}
    params = traverse_util.unflatten_dict(shapes, sep="/")
    state = flat(config.first_state(params, table, jax.random.key(0)))
    rows = [row for row in table if f"{row.path}:down" in shapes]
    assert rows
    for row in rows:
        rank = shapes[f"{row.path}:down"].shape[-1]
        fan_in, fan_out = row.declaration.fan(0), row.declaration.fan(1)
        of_a = (fan_out**0.5 * rank / fan_in**1.5) ** 0.25
        of_b = (rank / (fan_in * fan_out) ** 0.5) ** 0.25
        for name, deviation in (("down", of_a), ("up", of_b)):
            candidates = np.asarray(state[f"{row.path}:{name}/waiting"])
            np.testing.assert_allclose(candidates.std(), deviation, rtol=0.03)


def test_vectors_and_candidates_change_places():
    state = begun(CONFIG)
    after = followed(CONFIG, state)
    (path,) = [path for path in flat(state.params) if path.endswith("attention/q:down")]
    own, new = flat(state.parts["adapter"]), flat(after.parts["adapter"])
    for layer in range(2):
        both = [
            np.concatenate(
                [np.asarray(one[path])[layer].T, np.asarray(pool[f"{path}/waiting"])[layer]]
            )
            for one, pool in ((flat(state.params), own), (flat(after.params), new))
        ]
        np.testing.assert_array_equal(*(np.sort(x, axis=0) for x in both))


@pytest.mark.slow
def test_counterparts_lose_their_moments_and_wait_five_steps():
    state = begun(CONFIG)
    after = followed(CONFIG, state)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(after.opt_state):
        if leaf.ndim:
            assert not np.any(np.asarray(leaf)), keys
    still = dataclasses.replace(CONFIG, rate=0.0)
    for left in range(5, 0, -1):
        pauses = [x for path, x in flat(after.parts["adapter"]).items() if path.endswith("paused")]
        assert all(np.all(np.asarray(x) == left) for x in pauses)
        moved = jax.tree.map(lambda x: x + 1.0, after.params)
        after = followed(still, dataclasses.replace(after, params=moved), before=after)
        for path, value in flat(after.params).items():
            if path.endswith((":down", ":up")):
                np.testing.assert_array_equal(value + 1.0, flat(moved)[path])
    moved = jax.tree.map(lambda x: x + 1.0, after.params)
    after = followed(still, dataclasses.replace(after, params=moved), before=after)
    jax.tree.map(np.testing.assert_array_equal, after.params, moved)


@pytest.mark.slow
def test_swaps_come_at_the_rate_that_falls():
    config = dataclasses.replace(CONFIG, rate=0.5, steps=100)
    state = begun(config)
    counts = []
    for step in (0, 10):
        found = []
        for seed in range(30):
            given = dataclasses.replace(state, step=jnp.int32(step - 1), rng=jax.random.key(seed))
            after = flat(followed(config, given).parts["adapter"])
            found += [np.mean(x) / 5 for path, x in after.items() if path.endswith("paused")]
        counts.append(np.mean(found))
    np.testing.assert_allclose(counts, [0.5, 0.15], atol=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": 3}, "candidates=3 must be at least the rank, 4"),
        ({"rate": 2.0}, "rate=2.0 must lie between 0 and 1"),
        ({"steps": 0}, "adapter.steps=0 must be at least 1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_weights_that_cannot_move_are_refused():
    for precision in (PrecisionPolicy(parameters="bfloat16"), PrecisionPolicy(weights="w8a16")):
        with pytest.raises(ValueError, match="adds to the weights at every swap"):
            combinations.check(
                model=dataclasses.replace(TINY, adapter=CONFIG),
                execution=ExecutionConfig(precision=precision),
            )
