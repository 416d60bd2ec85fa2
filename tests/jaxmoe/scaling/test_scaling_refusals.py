# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Refusals of parameterisations with their exact text, and idempotence."""

import dataclasses
import re

import jax
import pytest

from jaxmoe.models.config import ForwardMultipliers
from jaxmoe.models.presets import ladder
from jaxmoe.scaling import (
    HYPERP_BASE,
    PARAMETERIZATIONS,
    BasePoint,
    BatchExponents,
    Budget,
    CompletePConfig,
    HyperPConfig,
    HyperPExponents,
    MuPPlusPlusMuonConfig,
    StandardConfig,
    StandardExponents,
    standard,
)
from jaxmoe.scaling.initialize import init_params, parameter_table
from tests.support.models import TINY

MODEL = ladder(16)
BUDGET = Budget(tokens=41_600_000_000, batch_tokens=2**19)
every_rule = pytest.mark.parametrize("name", PARAMETERIZATIONS)


def build(name, model=MODEL, budget=BUDGET, base=HYPERP_BASE, **options):
    return PARAMETERIZATIONS[name](**options).build(model, budget, base)


def refusal(text):
    return pytest.raises(ValueError, match=f"^{re.escape(text)}$")


@every_rule
def test_a_parameterisation_is_idempotent(name):
    once = build(name)
    assert build(name, once.model) == once


@pytest.mark.parametrize(
    "name", [name for name in PARAMETERIZATIONS if name not in ("standard", "muonh_vanilla")]
)
def test_multipliers_of_the_model_are_not_overwritten(name):
    for field in ("embedding", "residual", "logits", "router", "attention_scale"):
        own = dataclasses.replace(MODEL, multipliers=ForwardMultipliers(**{field: 0.3}))
        ours = getattr(build(name).model.multipliers, field)
        default = getattr(ForwardMultipliers(), field)
        with refusal(
            f"model.multipliers.{field}=0.3 would be overwritten: the parameterisation {name} sets"
            f" it to {ours} for this model; leave model.multipliers.{field} at {default}, or take"
            " the parameterisation standard, which keeps it"
        ):
            build(name, own)
        assert build("standard", own).model == own


def test_init_refuses_a_model_without_its_multipliers():
    """Only the model that the parameterisation returns has them."""
    small = dataclasses.replace(TINY, num_layers=2)
    built = build("hyperp", small)
    with refusal(
        "model.multipliers are not those that its parameterisation fills in, and the forward pass"
        " would go without them: use the model that the parameterisation returns"
        " (parameterization.model) everywhere"
    ):
        init_params(small, jax.random.key(0), parameterization=built)
    shapes = jax.eval_shape(
        lambda key: init_params(built.model, key, parameterization=built), jax.random.key(0)
    )
    assert shapes["embedding"]["weight"].shape == (small.vocab_size, small.embed_dim)


MISSING = {
    "mup": ("embed_dim", "batch_tokens"),
    "mup_plus_plus": ("num_layers", "embed_dim", "batch_tokens"),
    "completep": ("num_layers", "embed_dim"),
    "mup_muon": ("embed_dim", "batch_tokens"),
    "mup_plus_plus_muon": ("num_layers", "embed_dim", "batch_tokens"),
    "muonh_vanilla": ("batch_tokens",),
    "hyperp": ("num_layers", "tokens", "batch_tokens"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_number_of_the_base_point_is_refused(name):
    for field in ("num_layers", "embed_dim", "tokens", "batch_tokens"):
        base = dataclasses.replace(HYPERP_BASE, **{field: None})
        if field not in MISSING[name]:
            assert build(name, base=base) == build(name)
            continue
        with refusal(
            f"base.{field} is missing: {name} carries a learning rate from the point where it was"
            f" tuned; give --base.{field} N ({getattr(HYPERP_BASE, field)} in HyperP's paper)"
        ):
            build(name, base=base)


def test_a_law_that_is_off_needs_no_base_point():
    off = HyperPConfig(exponents=HyperPExponents(tokens=0.0, batch=0.0, depth=0.0))
    assert off.build(MODEL, BUDGET, BasePoint()).of("mlp_in").learning_rate_multiplier == 1.0


@pytest.mark.parametrize("name", ["hyperp", "muonh_vanilla"])
def test_tied_embeddings_are_refused_with_the_head_on_a_sphere(name):
    tied = dataclasses.replace(MODEL, has_tied_embeddings=True)
    with refusal(
        f"model.has_tied_embeddings=True: parameterization:{name} keeps the head on a sphere and"
        " the embedding off it, and tied they are one matrix: set model.has_tied_embeddings to"
        " False, or parameterization.tied_embeddings to adamw, which leaves the one matrix to AdamW"
    ):
        build(name, tied)
    allowed = build(name, tied, tied_embeddings="adamw")
    assert allowed.of("embedding").group == "adamw" and allowed.of("embedding").init_std == 0.02
    assert {row.declaration.role for row in parameter_table(tied, allowed)}.isdisjoint({"head"})


@pytest.mark.parametrize("name", ["mup", "mup_plus_plus", "mup_muon", "mup_plus_plus_muon"])
def test_tied_embeddings_have_the_scale_of_the_head(name):
    tied = dataclasses.replace(MODEL, has_tied_embeddings=True)
    assert build(name, tied).of("embedding").init_std == 0.02


@pytest.mark.parametrize("field", ["tokens", "batch_tokens"])
def test_an_empty_budget_is_refused(field):
    of_what = {"tokens": "the whole run", "batch_tokens": "one step"}[field]
    with refusal(
        f"budget.{field}=0 must be at least 1: the laws of a learning rate divide by it; give the"
        f" tokens of {of_what}"
    ):
        Budget(**({"tokens": 10, "batch_tokens": 10} | {field: 0}))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: HyperPExponents(tokens=float("nan")),
            "parameterization.exponents.tokens=nan must lie between -2 and 2; 0 turns it off",
        ),
        (
            lambda: MuPPlusPlusMuonConfig(base_head_dim=0),
            "parameterization.base_head_dim=0 must be at least 1",
        ),
        (
            lambda: HyperPConfig(logit_bound=0.0),
            "parameterization.logit_bound=0.0 must be above 0, or None for the paper's std of 0.02"
            " at every width",
        ),
        (
            lambda: BatchExponents(batch=9.0),
            "parameterization.exponents.batch=9.0 must lie between -2 and 2; 0 turns it off",
        ),
        (
            lambda: CompletePConfig(matrix_std=0.0),
            "parameterization.matrix_std=0.0 must be above 0",
        ),
        (
            lambda: StandardConfig(embedding_std=-1.0),
            "parameterization.embedding_std=-1.0 must be above 0",
        ),
        (
            lambda: standard(MODEL, options=StandardConfig(exponents=StandardExponents(batch=0.5))),
            "parameterization.exponents.batch needs a budget: give one, or set 0",
        ),
    ],
)
def test_bad_options_are_refused(make, text):
    with refusal(text):
        make()
