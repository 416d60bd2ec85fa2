# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters of the view form against the factor form and against folded weights."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from flax import traverse_util

from jaxmoe.adapters import LoraConfig, TargetsConfig, folded
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, LayerConfig
from jaxmoe.models.transformer import forward
from jaxmoe.scaling.initialize import init_params, parameter_table
from tests.support.models import FULL, TINY
from tests.support.tolerances import assert_close

MATRICES = (
    *("attention_in", "attention_out", "attention_gate", "mlp_in", "mlp_out"),
    *("shared_in", "shared_out", "expert_in", "expert_out", "embedding"),
)
WINDOWED = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, window=3)
CYCLE = dataclasses.replace(TINY, num_layers=4, layers=(LayerConfig(mixer=WINDOWED), LayerConfig()))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ViewedLora(LoraConfig):
    """LoRA whose sum with the weights is made inside the scan over layers."""

    has_view: ClassVar[bool] = True

    def rewrite(self, params, shared, part):
        """Return W + s A B for each adapted matrix of the part."""
        del shared, part
        return folded(params)


GIVEN = {"rank": 3, "expert_rank": 2, "targets": TargetsConfig(roles=MATRICES)}


def adapted(model, adapter):
    return dataclasses.replace(model, adapter=adapter)


def drawn(model):
    """Parameters with an addition that is not zero."""
    params = traverse_util.flatten_dict(init_params(model, jax.random.key(0)), sep="/")
    keys = dict(zip(params, jax.random.split(jax.random.key(1), len(params)), strict=True))
    for path in [path for path in params if path.endswith(":up")]:
        params[path] = 0.3 * jax.random.normal(keys[path], params[path].shape)
    return traverse_util.unflatten_dict(params, sep="/")


def tokens(model, rows=2, length=6):
    return jax.random.randint(jax.random.key(2), (rows, length), 0, model.vocab_size)


def loss_and_gradients(model, execution, params, ids, *, is_folded=False):
    """Return those of the trained parameters, by the adapter or by plain weights."""
    table = parameter_table(model)

    def loss(trained):
        used, given = model, table.merged(trained, params)
        if is_folded:
            given = folded(given, model.adapter, model.layer_numbers)
            used = adapted(model, None)
        return jnp.mean(forward(used, execution, given, ids).logits ** 2)

    return jax.value_and_grad(loss)(table.trained(params))


@pytest.mark.parametrize("name", ["full", pytest.param("cycle", marks=pytest.mark.slow)])
def test_factor_view_and_folded_weights_are_equal(name):
    base = {"full": FULL, "cycle": CYCLE}[name]
    forms = {
        "factor": (adapted(base, LoraConfig(**GIVEN)), False),
        "view": (adapted(base, ViewedLora(**GIVEN)), False),
        "fold": (adapted(base, ViewedLora(**GIVEN)), True),
    }
    params, ids = drawn(forms["factor"][0]), tokens(base)
    found = {
        form: jax.jit(
            functools.partial(loss_and_gradients, model, ExecutionConfig(), is_folded=is_folded)
        )(params, ids)
        for form, (model, is_folded) in forms.items()
    }
    assert_close(found["view"], found["fold"], "end_to_end")
    assert_close(found["view"], found["factor"], "end_to_end")
    assert float(jnp.abs(found["view"][1]["embedding"]["weight:down"]).max()) > 0
