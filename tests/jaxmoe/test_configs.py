# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Configs as JSON: round trips, strictness, differences, fingerprints."""

import dataclasses
import json

import pytest

from jaxmoe.configs import (
    differences,
    fingerprint,
    from_json,
    registry_of,
    to_json,
    varying_fields,
)
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import LayerConfig, ModelConfig, MoEConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.routing import CapacityConfig, LoadBalanceConfig, SigmoidTopKConfig
from jaxmoe.run.config import PretrainConfig, TrainingConfig
from tests.support.small_configs import (
    Balance,
    Bias,
    Model,
    MoE,
    Run,
    Sigmoid,
    Softmax,
    config,
)

RUNS = [
    Run(),
    Run(name="sigmoid", learning_rate=2, model=Model(layers=(1, 2), window=3, decay=0)),
    Run(model=Model(moe=None)),
    Run(model=Model(moe=MoE(router=Sigmoid(groups=2), balancers=()), is_tied=True)),
    Run(model=Model(moe=MoE(balancers=(Bias(), Balance(coefficient=0.5))), pair=(3, 4))),
]


@pytest.mark.parametrize("run", RUNS)
def test_json_round_trip(run):
    text = json.dumps(to_json(run), allow_nan=False)
    assert from_json(Run, json.loads(text)) == run


def test_json_is_tagged_with_the_name_in_the_registry():
    assert to_json(MoE()) == {
        "num_experts": 8,
        "top_k": 2,
        "router": {"kind": "softmax", "order": "before"},
        "gate": {"kind": "sqrt"},
        "balancers": [{"kind": "balance", "coefficient": 0.01}],
    }
    # A field called name is an ordinary field, not a tag.
    assert list(to_json(Run())) == ["name", "model", "learning_rate"]


def test_registry_keeps_the_order_of_the_union():
    assert list(registry_of(Softmax | Sigmoid).items()) == [
        ("softmax", Softmax),
        ("sigmoid_topk", Sigmoid),
    ]
    assert registry_of(Softmax) == {"softmax": Softmax}


def changed(path, value):
    data = to_json(Run())
    inner = data
    *parents, last = path.split(".")
    for key in parents:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is KeyError:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.moe.topk", 3, "model.moe.topk is not a field of MoE: did you mean 'top_k'?"),
        ("model.moe.top_k", KeyError, "MoE misses model.moe.top_k"),
        ("model.moe.top_k", "2", 'model.moe.top_k="2" must be int'),
        ("model.moe.top_k", True, "model.moe.top_k=true must be int"),
        ("model.moe.top_k", 9, "model.moe: moe.top_k=9 must not exceed moe.num_experts=8"),
        ("model.moe", 3, "model.moe=3 must be MoE or null"),
        (
            "model.moe.router.kind",
            "sofmax",
            "model.moe.router has kind 'sofmax': did you mean 'softmax'? "
            "(there is softmax, sigmoid_topk)",
        ),
        (
            "model.moe.router.order",
            "first",
            'model.moe.router.order="first" must be "before" or "after"',
        ),
        ("model.moe.balancers.0.rate", 1.0, "model.moe.balancers.0.rate is not a field of Balance"),
        ("model.layers", [1, 2.5], "model.layers.1=2.5 must be int"),
        ("model.pair", [1], "model.pair=[1] must be"),
        ("model.window", 1.5, "model.window=1.5 must be int or null"),
        ("model.is_tied", 1, "model.is_tied=1 must be bool"),
        ("learning_rate", False, "learning_rate=false must be float"),
    ],
)
def test_reading_is_strict_and_says_where(path, value, message):
    with pytest.raises(ValueError) as error:
        from_json(Run, changed(path, value))
    assert message in str(error.value)


def test_invalid_field_values_are_refused():
    with pytest.raises(ValueError, match="layers.0 holds a list"):
        to_json(Model(layers=([1],)))


def test_a_missing_tag_is_refused():
    saved = to_json(ModelConfig())
    assert saved["attention"].pop("kind") == "grouped_query"
    with pytest.raises(ValueError, match="attention has kind None .there is grouped_query, latent"):
        from_json(ModelConfig, saved)


def test_field_named_like_the_tag_is_refused():
    @config
    class Wrong:
        kind: str = "x"

    with pytest.raises(TypeError, match="Wrong.kind: rename the field"):
        to_json(Wrong())


def test_differences_name_each_field_once():
    saved = Run(name="a")
    model = Model(moe=MoE(top_k=4, router=Sigmoid(groups=7), balancers=(Balance(coefficient=1.0),)))
    given = Run(name="b", model=dataclasses.replace(model, window=3))
    expected = [
        'name: saved "a", given "b"',
        "model.moe.top_k: saved 2, given 4",
        "model.moe.router: saved softmax, given sigmoid_topk",
        "model.moe.balancers.0.coefficient: saved 0.01, given 1.0",
        "model.window: saved null, given 3",
    ]
    assert differences(saved, given) == expected
    assert differences(to_json(saved), given) == expected
    assert differences(saved, given, free=("name", "model.moe")) == expected[4:]
    assert differences(saved, given, free=("model.mo",)) == expected
    assert differences(saved, saved) == []


def test_differences_of_unequal_lengths_and_unknown_fields():
    given = Run(model=Model(moe=MoE(balancers=(Balance(), Bias()))))
    assert differences(Run(), given) == [
        "model.moe.balancers: saved [balance], given [balance, expert_bias]"
    ]
    old = to_json(Run())
    old["tokens"] = 5
    del old["learning_rate"]
    assert differences(old, Run()) == [
        "tokens: saved 5, given nothing",
        "learning_rate: saved nothing, given 0.001",
    ]


def test_fingerprint_is_of_the_values():
    assert fingerprint(Run()) == fingerprint(from_json(Run, to_json(Run())))
    assert fingerprint(Run(learning_rate=1)) == fingerprint(Run(learning_rate=1.0))
    assert len({fingerprint(run) for run in RUNS}) == len(RUNS)
    # Stable across versions of Python: it is written into checkpoints.
    assert fingerprint(Softmax()) == (
        "50532ff9a04780ced75af51617b2c5a33c3e53964450b83dc5060e4d505f3a71"
    )


def test_varying_fields_have_a_value_per_config():
    runs = [
        Run(),
        Run(learning_rate=2.0, model=Model(moe=MoE(router=Sigmoid(), top_k=1))),
        Run(model=Model(moe=MoE(router=Softmax(order="after")))),
    ]
    assert varying_fields(runs) == {
        "model.moe.top_k": ["2", "1", "2"],
        "model.moe.router": ["softmax", "sigmoid_topk", "softmax"],
        "learning_rate": ["0.001", "2.0", "0.001"],
        # The second has another router, and so no order.
        "model.moe.router.order": ['"before"', "-", '"after"'],
    }
    assert varying_fields(runs[:1]) == varying_fields([RUNS[0], RUNS[0]]) == {}


CHOICES = {
    (MoEConfig, "router", "sigmoid_topk"): (
        "moe.router='sigmoid_topk' is a name, and the field takes a config: write"
        " router=SigmoidTopKConfig(), from jaxmoe.routing import SigmoidTopKConfig"
    ),
    (MoEConfig, "router", "sigmoid"): (
        "moe.router='sigmoid' must be the config of a router: did you mean 'sigmoid_topk'?"
    ),
    (MoEConfig, "router", SigmoidTopKConfig): (
        "moe.router is the class SigmoidTopKConfig, not a config: write router=SigmoidTopKConfig()"
    ),
    (MoEConfig, "gate", "sqrt"): "write gate=SqrtGateConfig(), from jaxmoe.routing import Sqrt",
    (MoEConfig, "balancers", ("load_balance",)): "write balancers=(LoadBalanceConfig(),), from",
    (MoEConfig, "balancers", LoadBalanceConfig()): "must be a tuple: write balancers=(LoadBalance",
    (MoEConfig, "capacity", 1.25): (
        "moe.capacity=1.25 must be the config of a capacity (there is capacity, token_rounding)"
    ),
    (MoEConfig, "zero_computation", 2): (
        "moe.zero_computation=2 must be a ZeroComputationConfig, from jaxmoe.routing import"
        " ZeroComputationConfig"
    ),
    (SigmoidTopKConfig, "bias", "loss_free"): "write bias=LossFreeConfig(), from jaxmoe.routing",
    (ModelConfig, "attention", "latent"): (
        "write attention=LatentAttentionConfig(), from jaxmoe import LatentAttentionConfig"
    ),
    (
        ModelConfig,
        "moe",
        "moe",
    ): "model.moe='moe' must be a MoEConfig, from jaxmoe import MoEConfig",
    (ModelConfig, "layers", ("mamba",)): "must be a LayerConfig, from jaxmoe.models.config import",
    (LayerConfig, "mixer", "mamba"): "layer.mixer='mamba' is a name",
    (ExecutionConfig, "dispatcher", "all_to_all"): (
        "write dispatcher=AllToAllConfig(), from sharding.expert_parallel import AllToAllConfig"
    ),
    (ExecutionConfig, "mesh", 8): (
        "execution.mesh=8 must be a MeshConfig, from sharding import MeshConfig"
    ),
    (
        ExecutionConfig,
        "rules",
        "zero3",
    ): "execution.rules='zero3' must be 'data_parallel' or 'zero1'",
    (ExecutionConfig, "precision", "bfloat16"): "must be a PrecisionPolicy, from jaxmoe.precision",
    (PrecisionPolicy, "compute", "bf16"): "execution.precision.compute='bf16' must be 'auto' or",
    (
        TrainingConfig,
        "objective",
        "next_token",
    ): "write objective=NextTokenConfig(), from jaxmoe.tr",
    (
        PretrainConfig,
        "optimizer",
        "muonh",
    ): "optimizer='muonh' is a name, and the field takes a con",
}


@pytest.mark.parametrize(("cls", "field", "value"), CHOICES)
def test_a_value_that_is_no_choice_is_refused_with_what_to_import(cls, field, value):
    config = cls()
    object.__setattr__(config, field, value)  # tests check the types of the arguments before
    with pytest.raises(ValueError) as refusal:
        config.__post_init__()
    assert CHOICES[cls, field, value] in str(refusal.value)


def test_configs_of_a_choice_are_accepted():
    config = MoEConfig(router=SigmoidTopKConfig(bias=None), capacity=CapacityConfig(factor=2))
    assert config.router.name == "sigmoid_topk" and MoEConfig(capacity=None).capacity is None
