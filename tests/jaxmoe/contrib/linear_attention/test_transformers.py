# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each mixer against the module of transformers with the same weights: values, gradients, steps."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.linear_attention.gated_delta import GatedDeltaConfig
from jaxmoe.contrib.linear_attention.kimi_delta import KimiDeltaConfig
from jaxmoe.contrib.linear_attention.lightning import LightningConfig
from jaxmoe.contrib.linear_attention.short_convolution import ShortConvolutionConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.records import LayerCache, LayerInputs, TokenInputs
from tests.jaxmoe.contrib.linear_attention.mixers import BATCH, LENGTH, WIDTH, inputs, module_of
from tests.support.tolerances import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
PROMPT = 13


def loaded(family, suffix=""):
    """Return the modules of a family of transformers: models and configs."""
    pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    pytest.importorskip("transformers", reason="transformers is not installed: extra hf")
    return tuple(
        importlib.import_module(f"transformers.models.{family}.{part}_{family}")
        for part in ("modeling", "configuration")
    )


def with_random_weights(module):
    import torch

    rng = np.random.default_rng(3)
    with torch.no_grad():
        for parameter in module.parameters():
            values = rng.standard_normal(parameter.shape) * (0.3 if parameter.ndim > 1 else 1.0)
            parameter.copy_(torch.tensor(values, dtype=torch.float32))
    return module.eval()


def values_and_gradients(module, run):
    """Return the output, and the gradients of a weighted sum of it by x and by parameter."""
    import torch

    x = torch.tensor(np.asarray(inputs()), requires_grad=True)
    y = run(x)
    weights = torch.cos(torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape)
    (y * weights).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters()}
    return y.detach().numpy(), x.grad.numpy(), gradients


def check(config, module, convert, run, step, layer=None):
    """Compare values, gradients and decoding after a prompt with a module of transformers.

    Args:
        config: Mixer.
        module: Module of transformers with random weights.
        convert: Function from its tensors by name to parameters; linear, so that it also takes
            gradients.
        run: Function from x to its output.
        step: Function from x to its output, of which each call continues the last one.
        layer: Number of the layer in its stack.
    """
    import torch

    tensors = {name: p.detach().numpy() for name, p in module.named_parameters()}
    params = {name: jnp.asarray(value) for name, value in convert(tensors).items()}
    layer_inputs = LayerInputs(
        router_state={}, key=None, stack_layer=jnp.int32(layer or 0), moe_layer=jnp.int32(0)
    )
    layer_module = module_of(config)

    def number(params, x):
        tokens = TokenInputs(token_mask=jnp.ones((BATCH, LENGTH), bool))
        y = layer_module.apply({"params": params}, x, tokens, None, layer_inputs)[0]
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(y * weights), y

    gradient = jax.jit(jax.grad(number, (0, 1), has_aux=True))
    (by_param, by_x), y = gradient(params, inputs())
    expected, expected_by_x, expected_by_param = values_and_gradients(module, run)
    assert_close(y, expected, "end_to_end")
    assert_close(by_x, expected_by_x, "end_to_end")
    expected_by_param = {n: jnp.asarray(v) for n, v in convert(expected_by_param).items()}
    assert by_param.keys() == expected_by_param.keys()
    assert_close(by_param, expected_by_param, "end_to_end")

    @jax.jit
    def decode(x, entries):
        tokens = TokenInputs(token_mask=jnp.ones(x.shape[:2], bool))
        cache = LayerCache(entries=entries, layer=jnp.int32(0))
        y, outputs = layer_module.apply({"params": params}, x, tokens, cache, layer_inputs)
        return y, outputs.cache

    entries = config.initial_cache(ExecutionConfig(), layers=1, batch=BATCH, slots=LENGTH)
    pieces = [slice(0, PROMPT), *(slice(place, place + 1) for place in range(PROMPT, LENGTH))]
    for piece in pieces:
        y, entries = decode(inputs()[:, piece], entries)
        with torch.no_grad():
            expected = step(torch.tensor(np.asarray(inputs()[:, piece]))).numpy()
        assert_close(y, expected, "end_to_end")


@pytest.mark.rows(2)
@pytest.mark.parametrize("has_bias", [False, True])
def test_short_convolution_equals_lfm2_moe(has_bias):
    modeling, configuration = loaded("lfm2_moe")
    family = configuration.Lfm2MoeConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        conv_L_cache=3,
        conv_bias=has_bias,
        layer_types=["conv", "full_attention"],
    )
    module = with_random_weights(modeling.Lfm2MoeShortConv(family, layer_idx=0))
    config = ShortConvolutionConfig(
        num_channels=WIDTH, has_conv_bias=has_bias, has_projection_bias=has_bias
    )

    def convert(tensors):
        params = dict(zip("bcx", np.split(tensors["in_proj.weight"].T, 3, axis=1), strict=True))
        params["taps"] = tensors["conv.weight"][:, 0].T
        params["o"] = tensors["out_proj.weight"].T
        if has_bias:
            biases = np.split(tensors["in_proj.bias"], 3)
            params |= {f"{name}_in_bias": b for name, b in zip("bcx", biases, strict=True)}
            params |= {"bias": tensors["conv.bias"], "o_bias": tensors["out_proj.bias"]}
        return params

    cache = importlib.import_module("transformers.cache_utils").DynamicCache(config=family)
    step = functools.partial(module, past_key_values=cache)
    check(config, module, convert, module, step)


def by_key_head(matrix, config, sizes):
    """Return the parts of a projection whose outputs are those of one key head after another.

    Args:
        matrix: Weight [outputs, D] as transformers has it.
        config: Mixer.
        sizes: Outputs of each part for one key head.
    """
    grouped = matrix.T.reshape(WIDTH, config.num_key_heads, sum(sizes))
    return np.split(grouped, np.cumsum(sizes)[:-1], axis=-1)


@pytest.mark.rows(3)
@pytest.mark.parametrize("heads", [(6, 3), (4, 4), (4, 1)])
def test_gated_delta_equals_qwen3_next(heads):
    """Its in_proj_qkvz has q, k, v and z of one key head after another, in_proj_ba likewise."""
    modeling, configuration = loaded("qwen3_next")
    config = GatedDeltaConfig(
        num_heads=heads[0], num_key_heads=heads[1], head_dim=5, key_dim=7, chunk=8
    )
    family = configuration.Qwen3NextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        linear_num_value_heads=config.num_heads,
        linear_num_key_heads=config.num_key_heads,
        linear_value_head_dim=config.head_dim,
        linear_key_head_dim=config.key_dim,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
        layer_types=["linear_attention", "full_attention"],
    )
    module = with_random_weights(modeling.Qwen3NextGatedDeltaNet(family, layer_idx=0))
    keys = (config.num_key_heads, config.key_dim)
    values = (config.num_heads, config.head_dim)
    size = config.num_heads // config.num_key_heads

    def convert(tensors):
        sizes = [config.key_dim, config.key_dim, size * config.head_dim, size * config.head_dim]
        q, k, v, z = by_key_head(tensors["in_proj_qkvz.weight"], config, sizes)
        beta, dt = by_key_head(tensors["in_proj_ba.weight"], config, [size, size])
        params = {"q": q, "k": k, "v": v.reshape(WIDTH, *values), "z": z.reshape(WIDTH, *values)}
        params |= {"beta": beta.reshape(WIDTH, -1), "dt": dt.reshape(WIDTH, -1)}
        ends = np.cumsum([np.prod(keys), np.prod(keys)])
        taps = np.split(tensors["conv1d.weight"][:, 0].T, ends, axis=1)
        for name, tap, sizes in zip("qkv", taps, (keys, keys, values), strict=True):
            params[f"{name}_taps"] = tap.reshape(-1, *sizes)
        params |= {"a_log": tensors["A_log"], "dt_bias": tensors["dt_bias"]}
        params["norm"] = tensors["norm.weight"]
        params["o"] = tensors["out_proj.weight"].T.reshape(*values, WIDTH)
        return params

    cache = importlib.import_module("transformers.cache_utils").DynamicCache(config=family)
    step = functools.partial(module, cache_params=cache)
    check(config, module, convert, module, step)


def test_kimi_delta_equals_kimi_linear():
    modeling, configuration = loaded("kimi_linear")
    config = KimiDeltaConfig(
        num_heads=3, num_key_heads=3, head_dim=5, key_dim=5, gate_rank=5, chunk=8
    )
    family = configuration.KimiLinearConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        linear_num_heads=3,
        linear_head_dim=5,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
        layer_types=["linear_attention", "full_attention"],
    )
    module = with_random_weights(modeling.KimiLinearDeltaAttention(family, layer_idx=0))

    def convert(tensors):
        fused = {"decay_in": "forget_gate.f_a_proj", "gate_in": "g_a_proj", "beta": "b_proj"}
        params = {name: tensors[f"{key}.weight"].T for name, key in fused.items()}
        by_head = {name: f"{name}_proj" for name in "qkv"}
        by_head |= {"decay_out": "forget_gate.f_b_proj", "gate_out": "g_b_proj"}
        for name, key in by_head.items():
            params[name] = tensors[f"{key}.weight"].T.reshape(-1, 3, 5)
        taps = np.split(tensors["conv1d.weight"][:, 0].T, 3, axis=1)
        params |= {f"{n}_taps": tap.reshape(-1, 3, 5) for n, tap in zip("qkv", taps, strict=True)}
        params["a_log"] = tensors["forget_gate.A_log"].reshape(3)
        params["dt_bias"] = tensors["forget_gate.dt_bias"].reshape(3, 5)
        params["norm"] = tensors["o_norm.weight"]
        params["o"] = tensors["o_proj.weight"].T.reshape(3, 5, WIDTH)
        return params

    cache = importlib.import_module("transformers.cache_utils").DynamicCache(config=family)
    step = functools.partial(module, cache_params=cache)
    check(config, module, convert, module, step)


@pytest.mark.rows(2)
@pytest.mark.parametrize("layer", [0, 4])
def test_lightning_equals_minimax(layer):
    """Its qkv_proj has q, k and v of one head after another; blocks of 8 tokens there, 4 here."""
    modeling, configuration = loaded("minimax")
    config = LightningConfig(num_heads=3, head_dim=8, chunk=4, decay_layers=6, layer_step=2)
    family = configuration.MiniMaxConfig(
        hidden_size=WIDTH,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=8,
        block_size=8,
        rms_norm_eps=1e-5,
        layer_types=["linear_attention", "full_attention"] * 3,
    )
    module = with_random_weights(modeling.MiniMaxLightningAttention(family, layer_idx=layer))

    def convert(tensors):
        fused = tensors["qkv_proj.weight"].T.reshape(WIDTH, 3, 3, 8)
        params = {name: fused[:, :, place] for place, name in enumerate("qkv")}
        params["z"] = tensors["output_gate.weight"].T.reshape(WIDTH, 3, 8)
        params["norm"] = tensors["norm.weight"].reshape(3, 8)
        params["o"] = tensors["out_proj.weight"].T.reshape(3, 8, WIDTH)
        return params

    cache = modeling.MiniMaxCache()

    def run(x, past_key_values=None):
        return module(x, None, None, past_key_values=past_key_values)[0]

    step = functools.partial(run, past_key_values=cache)
    check(config, module, convert, run, step, layer=layer // config.layer_step)
