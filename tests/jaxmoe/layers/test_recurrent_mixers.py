# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mamba and Mamba-2 against transformers, documents alone, and their own steps; the convolution."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.convolution import convolve, last_inputs
from jaxmoe.layers.mixers import Mamba2Config, MambaConfig
from jaxmoe.layers.records import LayerCache, TokenInputs
from jaxmoe.precision import PrecisionPolicy
from tests.support.tolerances import assert_close

WIDTH, BATCH, LENGTH = 24, 2, 21
CONFIG = Mamba2Config(num_heads=6, head_dim=8, state_dim=5, num_groups=2, chunk=8)
MIXERS = {"mamba": MambaConfig(inner_dim=40, state_dim=4, step_rank=3, chunk=8), "mamba2": CONFIG}
every_mixer = pytest.mark.parametrize("name", MIXERS)
CONTEXT = LayerContext(embed_dim=WIDTH, norm_epsilon=1e-5)


def inputs():
    return jnp.asarray(
        np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH)), jnp.float32
    )


def module_of(config):
    return config.build(CONTEXT, ExecutionConfig())


@functools.cache
def params_of(name):
    """Parameters of which none has the value of a fresh layer."""
    about = TokenInputs(token_mask=jnp.ones((BATCH, LENGTH), bool))
    init = jax.jit(module_of(MIXERS[name]).init)
    fresh = init(jax.random.key(0), inputs(), about, None)["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda box: box.unbox() + 0.2 * rng.standard_normal(box.unbox().shape).astype(np.float32),
        fresh,
        is_leaf=lambda leaf: hasattr(leaf, "unbox"),
    )


@functools.cache
def mixer(name):
    """Return a jitted function of inputs and segments."""

    variables = {"params": params_of(name)}

    def mixed(x, segments):
        about = TokenInputs(token_mask=segments != 0, segment_ids=segments)
        return module_of(MIXERS[name]).apply(variables, x, about, None)[0]

    return jax.jit(mixed)


def test_a_convolution_equals_a_loop_over_channels_and_documents():
    rng = np.random.default_rng(2)
    x, taps, bias = (rng.standard_normal(s).astype(np.float32) for s in ((2, 9, 3), (4, 3), (3,)))
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 0], [4] * 9], np.int32)
    wanted = np.zeros_like(x)
    for row, place, channel in np.ndindex(x.shape):
        for tap in range(4):
            at = place - 3 + tap
            if at >= 0 and segments[row, at] == segments[row, place]:
                wanted[row, place, channel] += taps[tap, channel] * x[row, at, channel]
    found = convolve(*map(jnp.asarray, (x, taps, bias)), segment_ids=jnp.asarray(segments))
    assert_close(found, wanted + bias, "elementwise")
    before = jnp.asarray(x[:, :3])
    rest = convolve(jnp.asarray(x[:, 3:]), jnp.asarray(taps), jnp.asarray(bias), before=before)
    whole = convolve(jnp.asarray(x), jnp.asarray(taps), jnp.asarray(bias))
    assert_close(rest, whole[:, 3:], "elementwise")
    lengths = jnp.asarray([2, 6], jnp.int32)
    kept = last_inputs(jnp.asarray(x[:, 3:]), before, lengths)
    np.testing.assert_array_equal(kept, np.stack([x[0, 2:5], x[1, 6:9]]))


@every_mixer
def test_documents_in_a_row_equal_each_alone(name):
    segments = np.ones((BATCH, LENGTH), np.int32)
    segments[0, 9:] = 2
    segments[0, 13:] = 3
    segments[1, 17:] = 0  # padding
    x, mixed = inputs(), mixer(name)
    found = mixed(x, jnp.asarray(segments))
    whole = jnp.ones((1, LENGTH), jnp.int32)
    for row, first, last in ((0, 0, 9), (0, 9, 13), (0, 13, LENGTH), (1, 0, 17)):
        document = jnp.pad(
            x[row : row + 1, first:last], ((0, 0), (0, LENGTH - last + first), (0, 0))
        )
        alone = mixed(document, whole)[0, : last - first]
        assert_close(found[row, first:last], alone, "end_to_end")


@every_mixer
def test_no_token_sees_a_later_one(name):
    segments = jnp.ones((BATCH, LENGTH), jnp.int32)
    x, mixed = inputs(), mixer(name)
    changed = mixed(x.at[:, 12].add(1.0), segments) - mixed(x, segments)
    assert float(jnp.abs(changed[:, :12]).max()) == 0.0
    assert float(jnp.abs(changed[:, 12:]).max(axis=(0, 2)).min()) > 1e-6


@every_mixer
def test_steps_of_any_length_equal_the_whole(name):
    """Pieces of 7, 1 and 1 tokens; then a padded one, whose last token leaves the state."""
    x, execution, config = inputs(), ExecutionConfig(), MIXERS[name]
    variables = {"params": params_of(name)}
    wanted = mixer(name)(x, jnp.ones((BATCH, LENGTH), jnp.int32))

    @jax.jit
    def step(x, mask, entries):
        about = TokenInputs(token_mask=mask, positions=jnp.zeros(mask.shape, jnp.int32))
        cache = LayerCache(entries=entries, layer=jnp.int32(1))
        y, aside = module_of(config).apply(variables, x, about, cache)
        return y, aside.cache

    entries = config.initial_cache(execution, layers=2, batch=BATCH, slots=LENGTH)
    first, found = 0, []
    for count in (7, 1, 1):
        mask = jnp.ones((BATCH, count), bool)
        y, entries = step(x[:, first : first + count], mask, entries)
        found.append(y)
        first += count
    assert_close(jnp.concatenate(found, axis=1), wanted[:, :first], "end_to_end")
    padded = jnp.where(jnp.arange(8)[None, :, None] < 5, x[:, first : first + 8], 100.0)
    y, entries = step(padded, jnp.broadcast_to(jnp.arange(8) < 5, (BATCH, 8)), entries)
    assert_close(y[:, :5], wanted[:, first : first + 5], "end_to_end")
    y, entries = step(x[:, first + 5 : first + 6], jnp.ones((BATCH, 1), bool), entries)
    assert_close(y, wanted[:, first + 5 : first + 6], "end_to_end")
    assert all(not part[0].any() for part in entries), "the other layer's part is left"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("num_groups", [1, 2])
def test_mamba2_equals_that_of_transformers(num_groups):
    pytest.importorskip("transformers", reason="transformers is not installed: extra hf")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    modeling = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    configuration = importlib.import_module("transformers.models.mamba2.configuration_mamba2")
    config = dataclasses.replace(CONFIG, num_groups=num_groups)
    theirs = modeling.Mamba2Mixer(
        configuration.Mamba2Config(
            hidden_size=WIDTH,
            state_size=config.state_dim,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            n_groups=num_groups,
            expand=config.inner_dim // WIDTH,
            chunk_size=8,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            layer_norm_epsilon=CONTEXT.norm_epsilon,
        ),
        layer_idx=0,
    ).eval()
    rng = np.random.default_rng(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            values = rng.standard_normal(parameter.shape) * (0.3 if parameter.ndim > 1 else 1.0)
            parameter.copy_(torch.tensor(values, dtype=torch.float32))
        wanted = theirs(torch.tensor(np.asarray(inputs()))).numpy()
    own = as_ours(
        {name: value.detach().numpy() for name, value in theirs.named_parameters()}, config
    )
    about = TokenInputs(token_mask=jnp.ones((BATCH, LENGTH), bool))
    found = jax.jit(module_of(config).apply)({"params": own}, inputs(), about, None)[0]
    assert_close(found, wanted, "end_to_end")


def as_ours(theirs, config):
    """Return the parameters of transformers' mixer by our names."""
    heads, groups = (config.num_heads, config.head_dim), (config.num_groups, config.state_dim)
    inner, shared = config.inner_dim, config.num_groups * config.state_dim
    cuts = np.cumsum([inner, inner, shared, shared])
    z, x, b, c, dt = np.split(theirs["in_proj.weight"].T, cuts, axis=1)
    found = {"dt": dt, "a_log": theirs["A_log"], "dt_bias": theirs["dt_bias"], "skip": theirs["D"]}
    sizes = {"z": heads, "x": heads, "b": groups, "c": groups}
    for name, matrix in (("z", z), ("x", x), ("b", b), ("c", c)):
        found[name] = matrix.reshape(WIDTH, *sizes[name])
    taps = np.split(theirs["conv1d.weight"][:, 0].T, cuts[1:3] - inner, axis=1)
    biases = np.split(theirs["conv1d.bias"], cuts[1:3] - inner)
    for name, tap, bias in zip("xbc", taps, biases, strict=True):
        found[f"{name}_taps"] = tap.reshape(-1, *sizes[name])
        found[f"{name}_bias"] = bias.reshape(sizes[name])
    found["norm"] = theirs["norm.weight"].reshape(heads)
    found["o"] = theirs["out_proj.weight"].T.reshape(*heads, WIDTH)
    return {name: jnp.asarray(value) for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mamba_equals_that_of_transformers():
    pytest.importorskip("transformers", reason="transformers is not installed: extra hf")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    modeling = importlib.import_module("transformers.models.mamba.modeling_mamba")
    configuration = importlib.import_module("transformers.models.mamba.configuration_mamba")
    config = dataclasses.replace(MIXERS["mamba"], inner_dim=2 * WIDTH)
    theirs = modeling.MambaMixer(
        configuration.MambaConfig(
            hidden_size=WIDTH,
            state_size=config.state_dim,
            time_step_rank=config.step_rank,
            expand=2,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            use_mambapy=False,
        ),
        layer_idx=0,
    ).eval()
    rng = np.random.default_rng(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            values = rng.standard_normal(parameter.shape) * (0.3 if parameter.ndim > 1 else 1.0)
            parameter.copy_(torch.tensor(values, dtype=torch.float32))
        wanted = theirs(torch.tensor(np.asarray(inputs()))).numpy()
    given = {name: value.detach().numpy() for name, value in theirs.named_parameters()}
    x, z = np.split(given["in_proj.weight"].T, 2, axis=1)
    cuts = np.cumsum([config.step_rank, config.state_dim])
    r, b, c = np.split(given["x_proj.weight"].T, cuts, axis=1)
    own = {"x": x, "z": z, "r": r, "b": b, "c": c, "dt": given["dt_proj.weight"].T}
    own |= {"dt_bias": given["dt_proj.bias"], "a_log": given["A_log"], "skip": given["D"]}
    own |= {"taps": given["conv1d.weight"][:, 0].T, "bias": given["conv1d.bias"]}
    own["o"] = given["out_proj.weight"].T
    about = TokenInputs(token_mask=jnp.ones((BATCH, LENGTH), bool))
    found = jax.jit(module_of(config).apply)({"params": own}, inputs(), about, None)[0]
    assert_close(found, wanted, "end_to_end")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"state_dim": 0}, "mamba2.state_dim=0 must be above 0"),
        ({"num_groups": 4}, "mamba2.num_heads=6 must be a multiple of mamba2.num_groups=4"),
    ],
)
def test_bad_sizes_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(CONFIG, **changes)


def test_products_in_few_bits_are_refused():
    text = "execution.precision.weights=w8a16 is not for mamba2 layers"
    with pytest.raises(ValueError, match=text):
        CONFIG.check_precision(PrecisionPolicy(weights="w8a16"))
