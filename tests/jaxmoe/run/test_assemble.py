# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The state before the first step, of an assembled run."""

import chex
import jax
import jax.monitoring

from jaxmoe.run.assemble import assemble
from jaxmoe.scaling.initialize import init_params
from tests.jaxmoe.run.test_run import config


def _traces_of(function):
    """Return the result of a function, and the number of functions that JAX traced for it."""
    traced = []

    def listen(event, duration_secs, **kwargs):
        del duration_secs, kwargs
        traced.extend([event] * ("jaxpr_trace" in event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        return function(), len(traced)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_second_state_is_not_compiled_again():
    assembly = assemble(config())
    first, compiled = _traces_of(assembly.new_state)
    assert compiled > 0
    second, again = _traces_of(assembly.new_state)
    assert again == 0
    chex.assert_trees_all_equal(first, second)


def test_parameters_of_another_key_are_not_compiled_again():
    model = config().model
    init_params(model, jax.random.key(0))
    _, again = _traces_of(lambda: init_params(model, jax.random.key(1)))
    assert again == 0
