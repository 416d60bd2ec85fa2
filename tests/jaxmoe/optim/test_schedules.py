# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Schedules against optax's, at their corners, and in their refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.optim import SCHEDULES, CosineConfig, LinearConfig, WarmupStableDecayConfig
from tests.support.tolerances import assert_close

STEPS = 20

# Per schedule: one with warm-up and floor, and the optax schedule that it follows after warm-up.
CASES = {
    "linear": (
        LinearConfig(warmup_steps=4, floor=0.1),
        optax.linear_schedule(1.0, 0.1, STEPS - 4, transition_begin=4),
    ),
    "cosine": (
        CosineConfig(warmup_steps=4, floor=0.1),
        optax.join_schedules(
            [lambda count: 1.0, optax.cosine_decay_schedule(1.0, STEPS - 4, alpha=0.1)], [4]
        ),
    ),
    "wsd": (
        WarmupStableDecayConfig(warmup_steps=4, decay_fraction=0.25, floor=0.1),
        optax.linear_schedule(1.0, 0.1, 5, transition_begin=15),
    ),
}


def test_every_schedule_has_a_case():
    assert set(CASES) == set(SCHEDULES)
    assert all(type(config) is SCHEDULES[name] for name, (config, _) in CASES.items())


def _factors(config, steps: int = STEPS) -> np.ndarray:
    """The factor at each step, and at `steps` itself."""
    factor = jax.jit(jax.vmap(config.build(steps)))
    return np.asarray(factor(jnp.arange(steps + 1, dtype=jnp.int32)))


@pytest.mark.parametrize("name", CASES)
def test_equals_optax(name):
    config, theirs = CASES[name]
    factors = _factors(config)
    assert_close(factors[:4], np.array([0.25, 0.5, 0.75, 1.0]), kind="elementwise")
    with jax.numpy_dtype_promotion("standard"):
        wanted = [float(theirs(step)) for step in range(4, STEPS + 1)]
    assert_close(factors[4:], np.array(wanted), kind="elementwise")


@pytest.mark.parametrize("name", CASES)
def test_rises_then_falls_to_the_floor(name):
    factors = _factors(CASES[name][0])
    assert (np.diff(factors[:4]) > 0).all() and (np.diff(factors[3:]) <= 0).all()
    assert factors.max() == 1.0 and factors[-1] == pytest.approx(0.1)
    later = CASES[name][0].build(STEPS)(jnp.int32(10 * STEPS))
    assert later == pytest.approx(0.1), "past the end the floor stays"


def test_the_plateau_is_flat():
    factors = _factors(WarmupStableDecayConfig(decay_fraction=0.2, floor=0.0), steps=50)
    assert (factors[:41] == 1.0).all()
    assert_close(factors[40:], np.linspace(1, 0, 11), kind="elementwise")


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_the_first_step_is_the_peak(name):
    factors = _factors(SCHEDULES[name]())
    assert factors[0] == 1.0 and (np.diff(factors) <= 0).all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_of_one_step_has_a_schedule(name):
    assert np.isfinite(_factors(SCHEDULES[name](), steps=1)).all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_bad_fields_are_refused(name):
    for field, value, text in (
        ("warmup_steps", -1, "schedule.warmup_steps=-1 must be 0 or more"),
        ("floor", 1.5, "schedule.floor=1.5 must lie between 0 and 1"),
        ("floor", float("nan"), "schedule.floor=nan must lie between 0 and 1"),
    ):
        with pytest.raises(ValueError) as error:
            SCHEDULES[name](**{field: value})
        assert str(error.value) == text
    with pytest.raises(ValueError) as error:
        SCHEDULES[name](warmup_steps=20).build(20)
    assert str(error.value) == (
        "schedule.warmup_steps=20 must be at most 19, below the number of steps (20):"
        " shorten the warm-up, or train longer (training.steps)"
    )


def test_a_run_shorter_than_warm_up_and_decay_is_refused():
    schedule = WarmupStableDecayConfig(warmup_steps=20, decay_fraction=0.4)
    with pytest.raises(ValueError) as error:
        schedule.build(30)
    assert str(error.value) == (
        "schedule.warmup_steps=20 must be at most 18, the step at which"
        " schedule.decay_fraction=0.4 of 30 steps begins: set schedule.warmup_steps to 18 or less,"
        " or lower schedule.decay_fraction"
    )
    WarmupStableDecayConfig(warmup_steps=18, decay_fraction=0.4).build(30)


@pytest.mark.parametrize("fraction", [0.0, 1.1])
def test_a_bad_decay_fraction_is_refused(fraction):
    with pytest.raises(ValueError) as error:
        WarmupStableDecayConfig(decay_fraction=fraction)
    text = f"schedule.decay_fraction={fraction} must lie above 0 and at most 1"
    assert str(error.value) == text
