# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A plan that breaks a rule is an error that names policy and rule, and changes nothing."""

from __future__ import annotations

import pytest

from jaxmoe.contrib.serving_lab.batching import SIMULATED_BATCHING
from jaxmoe.serve import (
    BATCHING,
    Facts,
    Instance,
    Plan,
    PlanError,
    PromptPiece,
    Request,
    Sampling,
    Shapes,
)
from jaxmoe.serve.plan import Eviction
from tests.support.page_executor import PageExecutor


def served(kind=Instance, **changes):
    """Return an instance: 0, 1 decode, 2 is in its prompt, 3 and 4 wait; 3 pages are free."""
    sizes = {"num_pages": 8, "page_size": 4, "max_running": 4, "max_length": 32, "num_layers": 3}
    facts = Facts(**{**sizes, **changes})
    instance, executor = kind(facts, "wrong"), PageExecutor(facts)
    for id_, length in enumerate((3, 3, 14, 5, 5)):
        prompt = tuple(range(10 * id_, 10 * id_ + length))
        instance.submit(Request(id=id_, prompt=prompt, sampling=Sampling(max_tokens=9)), 0.0)
    plan = Plan.of([], [PromptPiece(0, 3), PromptPiece(1, 3), PromptPiece(2, 9)], admit=[0, 1, 2])
    (step,) = instance.start(plan, 0.0)
    instance.apply(step, executor.run(step), 1.0)
    (step,) = instance.start(Plan.of([0], [PromptPiece(2, 3)]), 1.0)
    instance.apply(step, executor.run(step), 2.0)
    return instance


BROKEN = {
    "known": (Plan.of([9]), "running", "sequence 9 does not run"),
    "a single twice": (Plan.of([0, 0]), "once", "names a sequence twice"),
    "single and piece": (Plan.of([0], [PromptPiece(0, 1)]), "once", "names a sequence twice"),
    "waiting": (Plan.of([], [PromptPiece(3, 5)]), "running", "sequence 3 does not run"),
    "evicted and computed": (Plan.of([0], evict=[Eviction(0)]), "running", "sequence 0 does not"),
    "evicted and admitted": (Plan.of([], admit=[0], evict=[Eviction(0)]), "once", "twice"),
    "evict a waiting one": (Plan.of([], evict=[Eviction(3)]), "evict", "sequence 3 does not run"),
    "admit a running one": (Plan.of([], admit=[0]), "admit", "sequence 0 does not wait"),
    "restore": (Plan(restore=(3,)), "restore", "sequence 3 is not swapped"),
    "too many": (
        Plan.of([], [PromptPiece(2, 3)]),
        "count",
        "3 tokens of sequence 2, which has 2 left",
    ),
    "none": (Plan((0,), (PromptPiece(2, 0),)), "count", "0 tokens of sequence 2"),
    "prompt as a single": (Plan.of([2]), "single", "sequence 2 has not 1 token left"),
    "pages": (
        Plan.of([1], [PromptPiece(2, 2), PromptPiece(3, 5), PromptPiece(4, 5)], admit=[3, 4]),
        "pages",
        "pages are lacking",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name):
    plan, rule, message = BROKEN[name]
    instance = served(max_running=5)
    before = [
        (one.state, one.computed, tuple(one.pages)) for one in instance.queues.sequences.values()
    ]
    with pytest.raises(PlanError, match=message) as error:
        instance.start(plan, 2.0)
    assert (error.value.policy, error.value.rule) == ("wrong", rule)
    assert f"policy 'wrong' breaks the rule {rule!r}" in str(error.value)
    after = [
        (one.state, one.computed, tuple(one.pages)) for one in instance.queues.sequences.values()
    ]
    assert before == after
    instance.check_pages()
    assert instance.start(Plan.of([0, 1], [PromptPiece(2, 2)]), 2.0)


def test_no_second_step_begins_beside_one():
    instance = served()
    assert instance.start(Plan.of([0]), 2.0)
    with pytest.raises(PlanError, match="as many steps run as may") as error:
        instance.start(Plan.of([1]), 2.0)
    assert error.value.rule == "free"


def test_more_sequences_than_may_run_are_not_admitted():
    instance = served(max_running=3)
    with pytest.raises(PlanError, match="4 sequences would run, at most 3"):
        instance.start(Plan.of([], [PromptPiece(3, 4)], admit=[3]), 2.0)


@pytest.mark.parametrize(
    "plan",
    [Plan.of([0, 1]), Plan.of([0], [PromptPiece(2, 2)])],
    ids=["three singles of two", "a piece of none"],
)
def test_shapes_that_are_not_compiled_are_refused(plan):
    instance = served()
    object.__setattr__(instance.facts, "shapes", Shapes(singles=1, pieces=((1, 1),)))
    with pytest.raises(PlanError, match="breaks the rule 'shape'"):
        instance.start(plan, 2.0)


def test_a_policy_that_needs_what_the_executor_lacks_is_refused_with_the_reason():
    facts = Facts(num_pages=4)
    for config in BATCHING.values():
        config().check(facts)
    for name, config in SIMULATED_BATCHING.items():
        with pytest.raises(ValueError, match=f"batching='{name}' needs .*: choose another"):
            config().check(facts)
