# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Modules as published weights have them: read, computed as transformers does, written back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint.huggingface import (
    from_huggingface,
    open_huggingface,
    read_huggingface,
    to_huggingface,
)
from jaxmoe.checkpoint.huggingface.export import suggest_family
from jaxmoe.checkpoint.huggingface.files import open_tensors
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.contrib.multi_token_prediction.config import MultiTokenModulesConfig
from jaxmoe.contrib.multi_token_prediction.modules import module_outputs
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelOptions
from jaxmoe.models.embedding import head_weight, output_logits
from jaxmoe.models.transformer import Transformer
from tests.support.huggingface_models import build, read, stacked
from tests.support.multi_token_files import LAYER_2, NUMBERED, PLACES, with_module
from tests.support.one_step import params_of
from tests.support.tolerances import assert_close

ONE = MultiTokenModulesConfig()


@pytest.mark.parametrize("name", [*NUMBERED, "qwen3_next"])
def test_modules_come_back_with_their_names_and_bits(name, tmp_path, caplog):
    config, state, *_ = with_module(name)
    model, params, router_state = read_huggingface(config, state, predictor=ONE)
    assert not caplog.messages
    assert model.extras.predictor == ONE
    place = to_huggingface(model, params, tmp_path / "mine", router_state=router_state, family=name)
    tensors = open_tensors(place)
    assert tensors.keys() == state.keys()
    for key in tensors:
        np.testing.assert_array_equal(np.asarray(tensors[key]), state[key], err_msg=key)
    again = read_huggingface(place, predictor=ONE)
    jax.tree.map(np.testing.assert_array_equal, tuple(again)[1:], (params, router_state))
    assert again.model == model
    plain, tensors = open_huggingface(place)
    assert plain.extras.predictor is None
    assert "tensors of layers for multi-token prediction are left out" in caplog.messages[-1]
    assert not any(row.path.startswith("further_blocks") for row in tensors.table)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NUMBERED, "qwen3_next"])
def test_logits_of_a_module_are_those_of_a_layer_of_transformers(name):
    """The states of the model are the inputs of the last layer after the final norm; the layer
    computes their projection with the next tokens."""
    import torch

    published = with_module(name)
    config, state = published[:2]
    model, params, router_state = read_huggingface(config, state, predictor=ONE)
    tokens = jnp.asarray(published.tokens)
    output = Transformer(model).apply({"params": params}, tokens, router_state=router_state or None)
    ahead = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    mask = jnp.ones(tokens.shape, bool).at[:, -1].set(False)
    _, outputs = module_outputs(
        model,
        ExecutionConfig(),
        params,
        output.hidden,
        {"tokens": tokens, "context": {}},
        ahead[:, :, None],
        mask[:, :, None],
        router_state=router_state or None,
    )
    logits = output_logits(outputs.hidden[0], head_weight(params, model), model, ExecutionConfig())

    theirs = build(published.layered_config).float()
    tensors = {k: torch.tensor(v) for k, v in stacked(published.layered_state).items()}
    theirs.load_state_dict(tensors)
    block, places = LAYER_2, PLACES["deepseek_v3"]
    if name == "qwen3_next":
        block, places = "", PLACES["qwen3_next"]
    enorm, hnorm, last, projection = (torch.tensor(state[block + place]) for place in places)
    inner = theirs.model
    norm_class = type(inner.norm)

    def norm(x, gain):
        layer = norm_class(config["hidden_size"], eps=config["rms_norm_eps"])
        layer.weight.data = gain
        return layer(x)

    def swap(_, arguments, given):
        """Give the last layer the input of the module in place of the stream."""
        hidden = arguments[0] if arguments else given["hidden_states"]
        state_norm = norm(inner.norm(hidden), hnorm)
        token_norm = norm(inner.embed_tokens(torch.tensor(np.asarray(ahead)).long()), enorm)
        x = torch.cat([token_norm, state_norm], dim=-1) @ projection.T
        return ((x, *arguments[1:]), given) if arguments else ((), {**given, "hidden_states": x})

    inner.layers[-1].register_forward_pre_hook(swap, with_kwargs=True)
    found = {}
    inner.layers[-1].register_forward_hook(lambda *given: found.update(x=given[-1]))
    with torch.no_grad():
        theirs(torch.tensor(published.tokens).long())
        x = found["x"][0] if isinstance(found["x"], tuple) else found["x"]
        wanted = theirs.lm_head(norm(x, last)).numpy()
    assert_close(np.asarray(logits)[:, :-1], wanted[:, :-1], "end_to_end")


def test_modules_that_are_not_there_are_refused():
    config, state, *_ = with_module("deepseek_v3")
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers=1 and .*depth=2 must be"):
        read_huggingface(config, state, predictor=MultiTokenModulesConfig(depth=2))
    changed = dict(state)
    name = "model.layers.2.shared_head.head.weight"
    changed[name] = state[name] + 1
    with pytest.raises(CheckpointError, match=f"{name} is not lm_head.weight, with which it"):
        read_huggingface(config, changed, predictor=ONE)
    del changed[name], changed["model.layers.2.eh_proj.weight"]
    with pytest.raises(CheckpointError, match="layers.2.eh_proj.weight: missing"):
        read_huggingface(config, changed, predictor=ONE)
    mixtral = read("mixtral")
    with pytest.raises(CheckpointError, match="read and written for deepseek_v3, .* not for mixt"):
        read_huggingface(mixtral.config, mixtral.state, predictor=ONE)
    with pytest.raises(CheckpointError, match="qwen3_next has one module, and .*depth=2: set it"):
        read_huggingface(*with_module("qwen3_next")[:2], predictor=MultiTokenModulesConfig(depth=2))


def test_a_family_without_names_gets_the_model_alone(tmp_path, caplog):
    mixtral = read("mixtral")
    plain, params = from_huggingface(mixtral.config, mixtral.state)
    model = dataclasses.replace(plain, options=ModelOptions(predictor=ONE))
    modules = {"further_blocks": params_of(model)["further_blocks"]}
    to_huggingface(plain, params, tmp_path / "plain")
    to_huggingface(model, params | modules, tmp_path / "modules")
    assert caplog.messages == [
        "the family has no names for modules after the last layer, and further_blocks is left out"
    ]
    for file in ("config.json", "model.safetensors"):
        pair = [(tmp_path / name / file).read_bytes() for name in ("plain", "modules")]
        assert pair[0] == pair[1]
    assert suggest_family(model) == ("mixtral", "")
