# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Options of attention in the rest of the library: sizes, served pages, few bits, adapters, mixers
that extend grouped-query attention, families of transformers, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.adapters import LoraConfig, TargetsConfig, fold_adapters
from jaxmoe.checkpoint.huggingface.describe import check_described
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import from_json, to_json
from jaxmoe.contrib.depth.parallel_streams import ParallelStreamsConfig
from jaxmoe.contrib.depth.shared_keys import SharedKeysConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.mixers.attention import AttentionConfig
from jaxmoe.layers.mixers.attention_parts import ChunksConfig, QueryTemperatureConfig
from jaxmoe.layers.rotary import DynamicScalingConfig, LongRopeConfig, YarnConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.flops import matmul_parameters
from jaxmoe.models.quantize import dequantize_parameter, quantize_parameter
from jaxmoe.models.transformer import forward
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.serve import Sampling
from jaxmoe.serve.device.executor import ModelExecutor
from tests.support.model_options import attention_fields
from tests.support.serving import MODEL, PLAIN, SIZES, check_answers, params, serve
from tests.support.tolerances import assert_close

OPTIONS = {
    "has_bias": True,
    "has_output_bias": True,
    "rotary_dim": 2,
    "rope_layout": "interleaved",
    "rope_scaling": YarnConfig(factor=4.0, original_length=16, truncate=False),
    "qk_norm_place": "after",
    "qkv_clip": 1.5,
    "is_gated": True,
    "gate_form": "element",
    "has_sinks": True,
    "query_temperature": QueryTemperatureConfig(floor_scale=4.0, attn_scale=0.5),
    "chunks": ChunksConfig(size=7),
}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}


def with_options(**options) -> ModelConfig:
    return dataclasses.replace(
        MODEL, attention=AttentionConfig(**HEADS, **attention_fields(**options))
    )


ALL = with_options(**OPTIONS)


def logits_of(model, values, execution=PLAIN, **options):
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 24, (3, 10)), jnp.int32)
    return jax.jit(lambda values: forward(model, execution, values, tokens, **options).logits)(
        values
    )


def test_the_parameters_are_those_of_the_options():
    plain, table = (parameter_table(model) for model in (with_options(), ALL))
    added = {row.path: row for row in table if row.path not in {other.path for other in plain}}
    names = {path.rpartition("/")[2]: row for path, row in added.items() if "moe_blocks" in path}
    shapes = {name: row.shape[1:] for name, row in names.items()}
    assert shapes == {
        "q_bias": (4, 4),
        "k_bias": (2, 4),
        "v_bias": (2, 4),
        "o_bias": (16,),
        "gate": (16, 4, 4),
        "sinks": (4,),
    }
    roles = {name: row.declaration.role for name, row in names.items()}
    assert roles.pop("gate") == "attention_gate" and set(roles.values()) == {"state"}
    assert names["gate"].declaration.fan(0) == 16 and names["gate"].declaration.fan(1) == 16
    per_layer = 16 * 4 * 4 + 4 * 4 + 2 * 2 * 4 + 16 + 4
    more = matmul_parameters(ALL, table) - matmul_parameters(with_options(), plain)
    assert more == 2 * per_layer
    assert ALL.attention.projection_parameters(
        16
    ) == with_options().attention.projection_parameters(16)
    values = init_params(ALL, jax.random.key(0))["moe_blocks_1"]["attention"]
    for name in ("q_bias", "k_bias", "v_bias", "o_bias", "sinks"):
        assert not np.asarray(values[name]).any()


def test_gates_of_features_are_counted_among_the_activations():
    def bytes_of(**options):
        config = AttentionConfig(**HEADS, **attention_fields(**options))
        return config.activations(lambda axis: 1, itemsize=2)

    plain, gated = bytes_of(), bytes_of(is_gated=True, gate_form="element")
    assert gated.projected - plain.projected == 4 * 4 * 4
    assert gated.kept - plain.kept == 4 * 4 * 4
    assert bytes_of(is_gated=True) == plain


def test_the_options_are_read_from_json_as_they_were_written():
    longrope = LongRopeConfig(long_factor=(1.0, 2.0))
    for scaling in (None, DynamicScalingConfig(), longrope, YarnConfig()):
        config = with_options(**OPTIONS | {"rotary_dim": 4, "rope_scaling": scaling})
        assert from_json(ModelConfig, to_json(config)) == config


REQUESTS = {
    id_: (
        (3, 1, 4, 1, 5, 9, 2)[: 2 + id_],
        Sampling(max_tokens=6, temperature=float(id_ > 0), seed=id_),
    )
    for id_ in range(4)
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "execution"),
    [
        pytest.param(OPTIONS, PLAIN, id="all"),
        pytest.param({"has_sinks": True, "window": 5}, PLAIN, id="sinks_window"),
        pytest.param({"chunks": ChunksConfig(size=3)}, PLAIN, id="chunks"),
        pytest.param(
            OPTIONS, ExecutionConfig(precision=PrecisionPolicy(cache="int8")), id="pages_of_int8"
        ),
    ],
)
def test_served_tokens_are_those_of_the_whole_pass(options, execution):
    model = with_options(**options)
    served = ModelExecutor(model, params(model), config=SIZES, execution=execution)
    found = serve(REQUESTS, {0: 0, 1: 0, 2: 2, 3: 5}, run=served.run)
    check_answers(REQUESTS, found.answers, model, execution)


@pytest.mark.slow
def test_weights_in_few_bits_leave_the_options_as_they_are():
    execution = ExecutionConfig(precision=PrecisionPolicy(weights="w8a8"))
    rows = parameter_table(ALL).tree(lambda row: row)
    small = jax.tree.map(
        lambda row, value: quantize_parameter(row, value, form="w8a8"), rows, params(ALL)
    )
    whole = {name: type(leaf).__name__ for name, leaf in small["moe_blocks_1"]["attention"].items()}
    assert {name for name, kind in whole.items() if kind == "QuantizedArray"} == set("qkvo")
    stored = jax.tree.map(
        dequantize_parameter, small, is_leaf=lambda leaf: hasattr(leaf, "dtype_name")
    )
    difference = logits_of(ALL, small, execution) - logits_of(ALL, stored)
    assert float(jnp.abs(difference).max()) < 0.15 * float(logits_of(ALL, stored).std())


@pytest.mark.slow
def test_adapters_of_the_projections_are_added_before_the_biases():
    roles = ("attention_in", "attention_out", "attention_gate")
    adapter = LoraConfig(rank=2, targets=TargetsConfig(roles=roles))
    model = dataclasses.replace(ALL, adapter=adapter)
    values = params(model)
    names = {row.path.rpartition("/")[2] for row in parameter_table(model)}
    assert {f"{name}:down" for name in ("q", "k", "v", "o", "gate")} <= names
    folded = fold_adapters(adapter.prepare(values, model.layer_numbers))
    assert_close(logits_of(model, values), logits_of(ALL, folded), "end_to_end")


@pytest.mark.slow
def test_one_stream_and_all_leaders_with_options_are_grouped_query_attention():
    sizes = HEADS | attention_fields(**OPTIONS)
    streams = ParallelStreamsConfig(**sizes, num_streams=1, prefix_length=0)
    leaders = SharedKeysConfig(**sizes, leader_every=1, own_probability=None)
    values = params(ALL)
    wanted = logits_of(ALL, values)
    for mixer in (streams, leaders):
        model = dataclasses.replace(MODEL, attention=mixer)
        extra = {path: value for path, value in params(model).items() if path not in values}
        assert_close(logits_of(model, values | extra), wanted, "end_to_end")


@pytest.mark.parametrize("name", OPTIONS)
def test_a_family_that_lacks_an_option_is_refused(name):
    """`is_gated` stands beside `gate_form`, which alone changes nothing."""
    options = {name: OPTIONS[name]}
    if name == "gate_form":
        options["is_gated"] = True
    field = name if name in ("is_gated", "query_temperature", "chunks") else "options"
    with pytest.raises(CheckpointError, match=f"attention.{field}"):
        check_described(with_options(**options), with_options(), "a family")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rotary_dim": 3}, r"attention\.options\.rotary_dim=3 must be an even number from 2"),
        ({"rotary_dim": 6}, r"attention\.options\.rotary_dim=6 must be an even number from 2"),
        ({"qkv_clip": 0.0}, r"attention\.options\.qkv_clip=0\.0 must be above 0"),
        ({"rope_scaling": LongRopeConfig(long_factor=(1.0,))}, "has 1 divisors, and 2 pairs"),
        (
            {"gate_form": "element"},
            "attention.options.gate_form='element' without attention.is_gated",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        with_options(**options)


def test_a_query_sees_half_of_a_chunk_on_average():
    config = AttentionConfig(**HEADS, chunks=ChunksConfig(size=4))
    assert config.heads.positions_seen(16) == 2.0 and config.heads.positions_seen(2) == 1.0
    both_ways = dataclasses.replace(config, is_causal=False)
    assert both_ways.heads.positions_seen(16) == 4.0


def test_chunks_without_positions_are_refused():
    with pytest.raises(ValueError, match=r"attention\.chunks\.size=0 must be above 0"):
        ChunksConfig(size=0)


def test_pages_refuse_wavelengths_that_depend_on_the_row():
    for scaling in (DynamicScalingConfig(), LongRopeConfig()):
        model = with_options(rope_scaling=scaling)
        with pytest.raises(ValueError, match=f"rope_scaling:{scaling.name} stretches"):
            ModelExecutor(model, params(model), config=SIZES)
