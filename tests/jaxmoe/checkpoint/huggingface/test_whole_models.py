# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models of text and images: their text model is read, everything else is left out."""

import dataclasses
import json
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Transformer
from jaxmoe.checkpoint import CheckpointError, read_huggingface, to_huggingface
from jaxmoe.checkpoint.huggingface import read_fields
from tests.support.huggingface_configs import CONFIGS
from tests.support.huggingface_models import read, tokens_of, write_directory
from tests.support.tolerances import assert_close


@dataclasses.dataclass(frozen=True)
class Whole:
    """A model of text and images around the text model of a family."""

    family: str
    name: str
    prefixes: tuple[str, str]
    """What names start with in the family, and in the whole model."""
    other: str
    """Name of a tensor of another part."""
    architecture: str
    vision: dict[str, Any]
    """Sizes of a tiny vision model."""

    def names(self, state):
        text, whole = self.prefixes
        return {
            whole + name.removeprefix(text) if name.startswith(text) else name: tensor
            for name, tensor in state.items()
        }


WHOLE = (
    Whole(
        family="llama4_text",
        name="llama4",
        prefixes=("", "language_model."),
        other="vision_model.class_embedding",
        architecture="Llama4ForConditionalGeneration",
        vision={
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "vision_output_dim": 8,
            "projector_input_dim": 8,
            "projector_output_dim": 8,
            "image_size": 8,
            "patch_size": 4,
        },
    ),
    Whole(
        family="qwen3_5_moe_text",
        name="qwen3_5_moe",
        prefixes=("model.", "model.language_model."),
        other="model.visual.pos_embed.weight",
        architecture="Qwen3_5MoeForConditionalGeneration",
        vision={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 8,
            "num_heads": 2,
            "num_position_embeddings": 4,
            "out_hidden_size": 36,
            "patch_size": 2,
        },
    ),
)
EACH = pytest.mark.parametrize("whole", WHOLE, ids=[whole.name for whole in WHOLE])


@EACH
def test_the_text_model_of_a_whole_model_is_read(whole, tmp_path, caplog):
    golden = read(whole.family)
    config = {
        "model_type": whole.name,
        "text_config": golden.config,
        "vision_config": whole.vision,
        "eos_token_id": [7, 9],
    }
    state = whole.names(golden.state) | {whole.other: np.ones((4, 4), np.float32)}
    place = write_directory(tmp_path / "it", config, state)
    with caplog.at_level(logging.WARNING):
        found = read_huggingface(place)
    message = f"1 tensors beside the text model are left out, {whole.other} first"
    assert message in caplog.messages
    wanted = read_huggingface(golden.config, golden.state)
    assert found.model == wanted.model
    jax.tree.map(np.testing.assert_array_equal, found[1:], wanted[1:])
    assert read_fields(place)["eos_token_id"] == [7, 9]
    # What is written is the text model.
    state = {"router_state": found.router_state} if found.router_state else {}
    family = {"family": whole.family}
    again = to_huggingface(found.model, found.params, tmp_path / "again", **family, **state)
    assert json.loads((again / "config.json").read_text())["model_type"] == whole.family
    jax.tree.map(np.testing.assert_array_equal, read_huggingface(again)[1:], wanted[1:])


def test_a_text_config_of_another_whole_model_is_refused():
    golden = read("llama4_text")
    for config in (
        {"model_type": "qwen3_5_moe", "text_config": golden.config},
        {"model_type": "llama4", "text_config": read("mixtral").config},
        {"model_type": "llama4", "text_config": ["llama4_text"]},
        {"model_type": "llama4"},
    ):
        with pytest.raises(CheckpointError, match="config.model_type='.*' is not among"):
            read_huggingface(config, golden.state)


def test_fields_of_the_text_config_are_checked_as_any():
    golden = read("llama4_text")
    config = {"model_type": "llama4", "text_config": golden.config | {"head_dim": "wide"}}
    with pytest.raises(CheckpointError, match="head_dim='wide' must be an integer above 0"):
        read_huggingface(config, golden.state)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@EACH
def test_logits_of_text_equal_those_of_transformers(whole):
    transformers = pytest.importorskip("transformers", reason="not installed: extra hf")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    text = CONFIGS[whole.family]
    fields = {"text_config": text, "vision_config": whole.vision, "attn_implementation": "eager"}
    config = transformers.AutoConfig.for_model(whole.name, **fields)
    config.text_config._experts_implementation = "eager"
    theirs = getattr(transformers, whole.architecture)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        tokens = tokens_of(text)
        logits = theirs(input_ids=torch.tensor(tokens).long()).logits.numpy()
    model, params, state = read_huggingface(theirs.config.to_dict(), theirs.state_dict())
    ours = jax.jit(
        lambda params, tokens: Transformer(model).apply(
            {"params": params}, tokens, router_state=state or None
        )
    )(params, jnp.asarray(tokens))
    assert_close(ours.logits, logits, "matmul")
