# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Where halves have their norms, and how they are added: formulas, meshes, stages, decoding."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.checkpoint import CheckpointError
from jaxmoe.checkpoint.huggingface import to_huggingface
from jaxmoe.contrib.depth.hyper_connections import HyperResidualConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.norms import CentredRmsNormConfig, LayerNormConfig
from jaxmoe.layers.records import RoutingInputs, TokenInputs
from jaxmoe.layers.residual import (
    LadderResidualConfig,
    ParallelResidualConfig,
    WeightedResidualConfig,
)
from jaxmoe.layers.single_half import NoFeedForwardConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import (
    DenseConfig,
    ForwardMultipliers,
    LayerConfig,
    ModelConfig,
    ModelOptions,
)
from jaxmoe.models.transformer import forward
from jaxmoe.scaling.initialize import init_params, parameter_table
from sharding import MeshConfig, make_mesh
from sharding.distributed import global_batch
from sharding.sequence_parallel import RingConfig
from tests.fuzz.pairs import compare_with
from tests.support.model_options import model_fields
from tests.support.models import FULL, LENGTH, tokens_for
from tests.support.tolerances import assert_close

BASE = dataclasses.replace(
    FULL, num_layers=2, multipliers=ForwardMultipliers(residual=0.7, embedding=4.0)
)
FACTORS: dict[str, Any] = {
    "mixer_stream": 1.5,
    "mixer_branch": 0.5,
    "feed_forward_stream": 0.8,
    "feed_forward_branch": 1.2,
}
VARIANTS = {
    "after": {"norm_place": "after"},
    "both": {"norm_place": "both", "norm": CentredRmsNormConfig()},
    "both layer": {
        "norm_place": "both",
        "norm": LayerNormConfig(has_bias=True),
        "attention": dataclasses.replace(FULL.attention, qk_norm="none"),
    },
    "before layer": {"norm": LayerNormConfig()},
    "parallel": {"residual": ParallelResidualConfig(), "norm": LayerNormConfig()},
    "parallel both": {
        "residual": ParallelResidualConfig(has_one_norm=False),
        "norm_place": "both",
    },
    "weighted": {"residual": WeightedResidualConfig(**FACTORS), "norm_place": "both"},
    "weighted norms": {"residual": WeightedResidualConfig(**FACTORS, adds_to_norm=True)},
}
SHORT = [
    pytest.param(name, marks=() if name in ("both layer", "parallel") else pytest.mark.slow)
    for name in VARIANTS
]


def model_of(name):
    return dataclasses.replace(BASE, **model_fields(**VARIANTS[name]))


@functools.cache
def params_of(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda w: 2.0 * w + 0.1 * rng.standard_normal(w.shape).astype(np.float32),
        init_params(model, jax.random.key(0)),
    )


def normalize(model, x, weights):
    """The formula of a norm, in jnp."""
    if model.norm.name == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + model.norm_epsilon)
    gain = weights["gain"] + float(model.norm.name == "centred_rms")
    vectors = [vector[None, None] for vector in (gain, weights.get("bias", 0.0 * gain))]
    return x * vectors[0] + vectors[1]


PARTS = ("stream", "branch")


def unrolled(model, params, tokens):
    """Hidden states of a loop over the layers, with norms written out."""
    mask, execution = jnp.ones(tokens.shape, bool), ExecutionConfig()
    routing = RoutingInputs(token_mask=mask, segment_ids=mask.astype(jnp.int32), router_state={})
    residual = model.residual
    is_shared = residual.has_one_norm
    x = 4.0 * params["embedding"]["weight"][tokens]
    for stack in model.stacks:
        for place in range(stack.num_layers):
            weights = jax.tree.map(lambda w, i=place: w[i], params[stack.path])
            mixer, fed = stack.kind.mixer, stack.kind.feed_forward

            def mix(y, mixer=mixer, weights=weights):
                module = mixer.build(model.context, execution)
                variables = {"params": weights["attention"]}
                return module.apply(variables, y, TokenInputs(token_mask=mask), None)[0]

            def feed(y, fed=fed, weights=weights):
                module = fed.build(model.context, execution, train=False)
                return module.apply({"params": weights[fed.module_name]}, y, routing)[0]

            def half(x, name, branch, factors=(1.0, 1.0), weights=weights):
                """The stream that a half adds to, and what it adds."""
                norms = "attention" if is_shared else name
                before = x
                if model.extras.norm_place != "after":
                    before = normalize(model, x, weights[f"{norms}_norm"])
                y = branch(before)
                if model.extras.norm_place in ("after", "both"):
                    y = normalize(model, y, weights[f"{name}_post_norm"])
                x = before if residual.adds_to_norm else x
                return factors[0] * x, factors[1] * 0.7 * y

            first = tuple(getattr(residual, f"mixer_{part}", 1.0) for part in PARTS)
            second = tuple(getattr(residual, f"feed_forward_{part}", 1.0) for part in PARTS)
            if residual.name == "parallel":
                outputs = [half(x, "attention", mix)[1], half(x, "feed_forward", feed)[1]]
                x = x + outputs[0] + outputs[1]
            else:
                x = sum(half(x, "attention", mix, first))
                x = sum(half(x, "feed_forward", feed, second))
    return normalize(model, x, params["final_norm"])


ON_ONE = ExecutionConfig()


def hidden(model, params, tokens, execution=ON_ONE):
    return forward(model, execution, params, tokens).hidden


def value_and_gradient(function):
    def total(params, tokens):
        x = function(params, tokens)
        return jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)), x

    return jax.jit(jax.value_and_grad(total, has_aux=True))


@functools.cache
def on_one_device(model):
    run = value_and_gradient(functools.partial(hidden, model))
    return run(params_of(model), tokens_for(model)[0])


@pytest.mark.parametrize("name", SHORT)
def test_a_variant_equals_a_loop_over_its_halves(name):
    model = model_of(name)
    run = value_and_gradient(functools.partial(unrolled, model))
    wanted = run(params_of(model), tokens_for(model)[0])
    assert_close(on_one_device(model), wanted, "end_to_end")


@pytest.mark.parametrize("name", SHORT)
def test_cached_steps_of_a_variant_equal_the_whole_forward(name):
    model, execution = model_of(name), ExecutionConfig()
    tokens, params = tokens_for(model)[0], params_of(model)

    @jax.jit
    def step(tokens, position, cache):
        positions = jnp.broadcast_to(position, tokens.shape)
        output = forward(model, execution, params, tokens, positions=positions, cache=cache)
        return output.hidden, output.cache

    cache, parts = initial_cache(model, execution, batch=tokens.shape[0], length=LENGTH), []
    for position in range(LENGTH):
        place = jnp.full((1, 1), position, jnp.int32)
        part, cache = step(tokens[:, position : position + 1], place, cache)
        parts.append(part)
    assert_close(jnp.concatenate(parts, axis=1), on_one_device(model)[0][1], "end_to_end")


EXECUTIONS = {
    "data4_tensor2": ExecutionConfig(mesh=MeshConfig(data=4, tensor=2)),
    "data2_expert2_seq2": ExecutionConfig(
        mesh=MeshConfig(data=2, expert=2, seq=2), sequence_parallel=RingConfig(layout="contiguous")
    ),
    "full_remat": ExecutionConfig(remat="full", mesh=MeshConfig(data=8)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"), [*zip(VARIANTS, itertools.cycle(EXECUTIONS), strict=False)]
)
def test_a_variant_is_the_same_on_eight_devices(name, place):
    execution = EXECUTIONS[place]
    model, mesh = model_of(name), make_mesh(execution.mesh, jax.devices()[:8])
    places = parameter_table(model).tree(lambda row: NamedSharding(mesh, row.spec))
    params = jax.device_put(params_of(model), places)
    tokens = global_batch({"tokens": np.asarray(tokens_for(model)[0])}, mesh)["tokens"]
    with jax.set_mesh(mesh):
        run = value_and_gradient(functools.partial(hidden, model, execution=execution))
        result = run(params, tokens)
    assert_close(result, on_one_device(model), "end_to_end")


STEPS = {
    "stage": {"execution.mesh": MeshConfig(stage=2, data=4), "training.accumulation": 2},
    "stage_tensor": {
        "execution.mesh": MeshConfig(stage=2, data=2, tensor=2),
        "training.accumulation": 2,
        "execution.loss_chunk": 8,
    },
    "tensor_seq": {
        "execution.mesh": MeshConfig(data=2, tensor=2, seq=2),
        "execution.sequence_parallel": RingConfig(),
        "execution.loss_chunk": 8,
    },
    "host_parameters": {"execution.offload.parameters": "host", "execution.remat": "full"},
    "telemetry": {"execution.telemetry": "detailed", "execution.mesh": MeshConfig(data=8)},
    "hyper": {
        "model.residual": HyperResidualConfig(),
        "execution.mesh": MeshConfig(data=4, tensor=2),
    },
    "ladder": {
        "model.residual": LadderResidualConfig(),
        "execution.mesh": MeshConfig(data=4, tensor=2),
    },
}


PAIRS = (
    ("after", "stage"),
    ("parallel", "stage"),
    ("weighted norms", "stage"),
    ("both", "stage_tensor"),
    ("weighted", "stage_tensor"),
    ("after", "tensor_seq"),
    ("both layer", "tensor_seq"),
    ("parallel both", "tensor_seq"),
    ("parallel", "telemetry"),
    ("both", "host_parameters"),
    ("parallel", "host_parameters"),
    ("after", "hyper"),
    ("both layer", "ladder"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), PAIRS)
def test_a_training_step_of_a_variant_is_that_of_one_device(name, step):
    variant = {f"model.{field}": value for field, value in model_fields(**VARIANTS[name]).items()}
    outcome = compare_with({**variant, **STEPS[step]})
    assert outcome.name == "equal", outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage", "stage_tensor", "tensor_seq"])
def test_a_training_step_with_softcapped_logits_is_that_of_one_device(name):
    outcome = compare_with({"model.options": ModelOptions(logits_softcap=0.3), **STEPS[name]})
    assert outcome.name == "equal", outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["tensor_seq", "telemetry", "host_parameters", "chunks"])
def test_a_training_step_with_biases_of_the_head_is_that_of_one_device(name, is_tied):
    step = STEPS.get(name, {"execution.mesh": MeshConfig(data=8), "execution.loss_chunk": 8})
    head = {"model.options": ModelOptions(has_head_bias=True), "model.has_tied_embeddings": is_tied}
    outcome = compare_with(head | step)
    assert outcome.name == "equal", outcome.text


@pytest.mark.parametrize("name", VARIANTS)
def test_other_models_of_hugging_face_refuse_a_variant(name, tmp_path):
    model = ModelConfig(num_layers=2, embed_dim=16, **model_fields(**VARIANTS[name]))
    params = parameter_table(model).tree(lambda row: np.zeros(row.shape, np.float32))
    with pytest.raises(CheckpointError, match=r"model\.(norm|options|residual)\b"):
        to_huggingface(model, params, tmp_path / "out")


def test_other_models_of_hugging_face_refuse_softcapped_logits(tmp_path):
    model = ModelConfig(num_layers=2, embed_dim=16, **model_fields(logits_softcap=3.0))
    params = parameter_table(model).tree(lambda row: np.zeros(row.shape, np.float32))
    with pytest.raises(CheckpointError, match=r"model\.options: options here"):
        to_huggingface(model, params, tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": LayerNormConfig()},
        {"norm_place": "after"},
        {"logits_softcap": 3.0},
        {"has_head_bias": True},
    ],
    ids=["norm", "place", "softcap", "bias"],
)
def test_the_modelling_file_refuses_what_it_does_not_compute(changes, tmp_path):
    model = ModelConfig(num_layers=2, embed_dim=16, **model_fields(**changes))
    params = parameter_table(model).tree(lambda row: np.zeros(row.shape, np.float32))
    with pytest.raises(CheckpointError, match=r"model\.(norm|options)"):
        to_huggingface(model, params, tmp_path / "out", family="jaxmoe")


def mixer_alone(model):
    """The model with a first layer that has no feed-forward."""
    layers = (LayerConfig(feed_forward=NoFeedForwardConfig()), LayerConfig())
    return dataclasses.replace(model, layers=layers, dense_layers=())


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("ladder", "parallel")), "both"]
)
def test_a_layer_without_feed_forward_is_one_whose_feed_forward_returns_zeros(name):
    changes = {"residual": LadderResidualConfig()} if name == "ladder" else VARIANTS[name]
    model = mixer_alone(dataclasses.replace(BASE, multipliers=None, **model_fields(**changes)))
    zeros = LayerConfig(feed_forward=DenseConfig(hidden_dim=4))
    plain = dataclasses.replace(model, layers=(zeros, LayerConfig()))
    params = dict(params_of(model))
    names = ("none_blocks_0", "dense_blocks_0")
    assert all(path.startswith("attention") for path in params[names[0]])
    layer = init_params(plain, jax.random.key(1))[names[1]]
    layer = jax.tree.map(jnp.zeros_like, layer) | params[names[0]]
    whole = {name: tree for name, tree in params.items() if name != names[0]} | {names[1]: layer}
    tokens = tokens_for(model)[0]
    result = value_and_gradient(functools.partial(hidden, model))(params, tokens)
    wanted = value_and_gradient(functools.partial(hidden, plain))(whole, tokens)
    assert_close(result[0], wanted[0], "end_to_end")
    half = {name: wanted[1][names[1]][name] for name in params[names[0]]}
    assert_close(result[1][names[0]], half, "end_to_end")
    assert_close(result[1]["moe_blocks_1"], wanted[1]["moe_blocks_1"], "end_to_end")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["stage", "tensor_seq", "telemetry", "host_parameters", "hyper"])
def test_a_training_step_with_layers_of_one_half_is_that_of_one_device(step):
    layers = (LayerConfig(feed_forward=NoFeedForwardConfig()), LayerConfig())
    outcome = compare_with({"model.layers": layers, **STEPS[step]})
    assert outcome.name == "equal", outcome.text


def test_norms_have_parameters_only_where_they_are():
    names = {"before": (True, False), "after": (False, True), "both": (True, True)}
    for place, (is_before, is_after) in names.items():
        table = parameter_table(dataclasses.replace(BASE, **model_fields(norm_place=place)))
        paths = {row.path for row in table}
        for half in ("attention", "feed_forward"):
            assert (f"moe_blocks_1/{half}_norm/gain" in paths) == is_before
            assert (f"moe_blocks_1/{half}_post_norm/gain" in paths) == is_after
    shared = {row.path for row in parameter_table(model_of("parallel"))}
    assert not any("feed_forward_norm" in path for path in shared)
    assert "moe_blocks_1/attention_norm/gain" in shared
