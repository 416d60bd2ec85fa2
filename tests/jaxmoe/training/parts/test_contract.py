# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Contract of the socket `StepPart` (`jaxmoe/training/parts/base.py`), for every member."""

import ast
import dataclasses
import math
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.adapters import AdaLoraConfig
from jaxmoe.contrib.adapters.average import Averaging, BalancedAverageConfig
from jaxmoe.contrib.levels.measures import LevelMeasures
from jaxmoe.contrib.slow_links.workers.step import ForeignRows
from jaxmoe.contrib.survival.layer_norms import LayerNorms, VocabularyMirror
from jaxmoe.contrib.telemetry.step import DetailedMeasures
from jaxmoe.optim import adamw
from jaxmoe.training.parts.adapter_rule import AdapterRule
from jaxmoe.training.parts.base import StepPart
from jaxmoe.training.parts.measures import MEASURES
from jaxmoe.training.parts.worker_losses import WorkerLosses
from jaxmoe.training.state import init_state, model_parts
from jaxmoe.training.step import Step, make_train_step
from tests.support.models import TINY
from tests.support.one_step import batch
from tests.support.source_tree import module_name, modules, tree

OPTIMIZER = adamw(1e-2)
ADALORA = AdaLoraConfig()
CASES = {
    Averaging: (Averaging(config=BalancedAverageConfig()), TINY),
    AdapterRule: (AdapterRule(adapter=ADALORA), dataclasses.replace(TINY, adapter=ADALORA)),
    LayerNorms: (LayerNorms(), dataclasses.replace(TINY, dense_layers=())),
}
"""A member of each class, and a model that it can train with."""
STATELESS = {
    DetailedMeasures,
    ForeignRows,
    LevelMeasures,
    VocabularyMirror,
    WorkerLosses,
}
"""Members without a state on one device, which have tests of their own: measures and losses beside
their verticals and in test_worker_losses.py, rows of other workers in
tests/jaxmoe/contrib/slow_links/workers, the mirror on a mesh in
tests/jaxmoe/contrib/survival/test_recovery.py."""


def _members():
    """Every class of jaxmoe, its verticals included, that derives from `StepPart`."""
    return {
        pkgutil.resolve_name(f"{module_name(path)}:{node.name}")
        for path in modules("jaxmoe")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base) == StepPart.__name__ for base in node.bases)
    }


def _further(part, model):
    """The parts that a step with this one is made with: not those that the model brings."""
    return () if part in model_parts(model) else (part,)


def test_every_member_has_a_case_and_a_name_of_its_own():
    assert _members() == set(CASES) | STATELESS | {type(part) for part in MEASURES}
    names = [member.name for member in _members()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("member", CASES, ids=lambda member: member.name)
def test_a_refused_step_leaves_the_state_of_a_part_as_it_was(member):
    """Bitwise, and with it parameters and moments; accepted steps before and after move it."""
    part, model = CASES[member]
    members = _further(part, model)
    state = init_state(model, OPTIMIZER, jax.random.key(0), parts=members)
    step = make_train_step(model, OPTIMIZER, parts=members)
    assert set(state.parts) == {part.name}
    seen = [jax.tree.map(np.asarray, state.parts)]
    for weight in (1.0, math.nan, 1.0):
        before = jax.tree.map(np.asarray, (state.params, state.opt_state))
        state, metrics = step(state, batch(weight))
        assert bool(metrics.is_skipped) == math.isnan(weight)
        if metrics.is_skipped:
            after = (state.params, state.opt_state)
            jax.tree.map(np.testing.assert_array_equal, before, after)
        seen.append(jax.tree.map(np.asarray, state.parts))
    jax.tree.map(np.testing.assert_array_equal, seen[1], seen[2])
    for one, other in ((0, 1), (2, 3)):
        pairs = zip(*map(jax.tree.leaves, (seen[one], seen[other])), strict=True)
        assert any(np.any(before != after) for before, after in pairs)


@pytest.mark.parametrize("member", CASES, ids=lambda member: member.name)
def test_a_state_without_the_part_is_refused_when_the_step_is_traced(member):
    part, model = CASES[member]
    state = jax.eval_shape(lambda: init_state(model, OPTIMIZER, jax.random.key(0)))
    state = dataclasses.replace(state, parts={})
    with pytest.raises(ValueError, match=f"state.parts has no {part.name}, .* parts=step.parts"):
        make_train_step(model, OPTIMIZER, parts=_further(part, model)).trace(state, batch())


def test_two_parts_of_one_name_are_refused():
    part, model = CASES[Averaging]
    with pytest.raises(ValueError, match="two parts of a step have the name average"):
        Step(model=model, optimizer=OPTIMIZER, parts=(part, part))


@dataclasses.dataclass(frozen=True)
class Halved(StepPart):
    """Halves the gradients, and measures their norm and how far the parameters have moved."""

    name = "halved"

    def update(self, step, state, batch, gradients):
        del step, state, batch
        summed = gradients.summed
        grads = jax.tree.map(lambda x: 0.5 * x, summed.grads)
        measures = {**gradients.measures, "exchange": {"norm": optax.tree.norm(grads)}}
        return gradients._replace(summed=summed.replace(grads=grads), measures=measures)

    def measure(self, step, outcome):
        moved = jax.tree.map(jnp.subtract, outcome.before.params, outcome.after.params)
        return {"disk": {"moved": optax.tree.norm(moved)}}


def test_a_part_of_ones_own_changes_the_gradients_and_measures_the_step():
    """Half the gradients at a rate of 1 move the parameters as all of them at half the rate."""
    results = []
    for rate, members in ((1.0, (Halved(),)), (0.5, ())):
        optimizer = optax.sgd(rate)
        state = init_state(TINY, optimizer, jax.random.key(0), parts=members)
        step = make_train_step(TINY, optimizer, clip=None, parts=members)
        results.append(step(state, batch()))
    (half, metrics), (whole, plain) = results
    for one, other in zip(*map(jax.tree.leaves, (half.params, whole.params)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    norms = [metrics.grad_norm, metrics.exchange["norm"], metrics.disk["moved"]]
    np.testing.assert_allclose(norms, [0.5 * plain.grad_norm] * 3, rtol=1e-4)
    assert not plain.exchange and not plain.disk


def test_a_part_is_neutral_by_default():
    """A step is the same program with a part that overrides nothing, or has nothing to keep."""

    @dataclasses.dataclass(frozen=True)
    class Neutral(StepPart):
        name = "neutral"

    state = jax.eval_shape(lambda: init_state(TINY, OPTIMIZER, jax.random.key(0)))
    texts = [
        make_train_step(TINY, OPTIMIZER, parts=members).lower(state, batch()).as_text()
        for members in ((), (Neutral(), VocabularyMirror()))
    ]
    assert texts[0] == texts[1]
