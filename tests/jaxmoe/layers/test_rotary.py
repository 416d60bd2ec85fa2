# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Stretched wavelengths of RoPE against loops in numpy and against transformers; layouts and parts
of heads against complex numbers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.catalog import names
from jaxmoe.layers.rotary import (
    DynamicScalingConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeConfig,
    YarnConfig,
    rotary_angles,
    rotate,
    rotate_in_place,
)

DIM, THETA = 16, 10_000.0
SHORT = tuple(1.0 + 0.1 * h for h in range(DIM // 2))
LONG = tuple(2.0 + 0.5 * h for h in range(DIM // 2))

SCALINGS = {
    "linear": LinearScalingConfig(factor=3.0),
    "dynamic": DynamicScalingConfig(factor=4.0, original_length=16),
    "dynamic, set length": DynamicScalingConfig(factor=2.0, original_length=16, length=100),
    "yarn": YarnConfig(factor=8.0, original_length=64),
    "yarn, fine edges": YarnConfig(
        factor=32.0, original_length=64, mscale=None, mscale_all_dim=None, truncate=False
    ),
    "yarn, factor": YarnConfig(factor=4.0, original_length=512, attention_factor=0.8),
    "yarn, weights": YarnConfig(factor=4.0, original_length=32, mscale=0.7, mscale_all_dim=1.3),
    "llama3": Llama3ScalingConfig(original_length=256),
    "llama3, a step": Llama3ScalingConfig(
        factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_length=256
    ),
    "llama3, other": Llama3ScalingConfig(
        factor=5.0, low_freq_factor=2.0, high_freq_factor=8.0, original_length=1024
    ),
    "longrope": LongRopeConfig(
        short_factor=SHORT, long_factor=LONG, original_length=16, factor=4.0
    ),
    "longrope, long": LongRopeConfig(
        short_factor=SHORT, long_factor=LONG, original_length=16, factor=4.0, rows="long"
    ),
    "longrope, factor": LongRopeConfig(
        short_factor=SHORT, long_factor=LONG, original_length=16, attention_factor=1.2
    ),
    "longrope, two factors": LongRopeConfig(
        short_factor=SHORT,
        long_factor=LONG,
        original_length=16,
        attention_factor=1.2,
        long_attention_factor=0.7,
    ),
    "longrope, long, two factors": LongRopeConfig(
        short_factor=SHORT,
        long_factor=LONG,
        original_length=16,
        long_attention_factor=0.7,
        rows="long",
    ),
}
LENGTHS = (10, 40)
"""Below and above the original length of the members that read it."""


def reference(scaling, length: int) -> tuple[np.ndarray, float]:
    """Frequencies and the factor of cosines and sines, one feature after the other."""
    frequencies = []
    size = 1.0
    for h in range(DIM // 2):
        base = THETA ** (-2 * h / DIM)
        match scaling:
            case LinearScalingConfig():
                frequency = base / scaling.factor
            case DynamicScalingConfig():
                reach = max(scaling.length or length, scaling.original_length)
                growth = scaling.factor * reach / scaling.original_length - scaling.factor + 1
                frequency = (THETA * growth ** (DIM / (DIM - 2))) ** (-2 * h / DIM)
            case YarnConfig():
                frequency, size = _yarn(scaling, h, base)
            case Llama3ScalingConfig():
                wavelength = 2 * math.pi / base
                low = scaling.original_length / scaling.low_freq_factor
                high = scaling.original_length / scaling.high_freq_factor
                turns = scaling.original_length / wavelength
                share = (turns - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor or 1.0
                )
                between = (1 - share) * base / scaling.factor + share * base
                slow = base / scaling.factor if wavelength > low else between
                frequency = base if wavelength < high else slow
            case LongRopeConfig():
                is_long = scaling.rows == "long" or length > scaling.original_length
                frequency = base / (scaling.long_factor if is_long else scaling.short_factor)[h]
                logs = math.log(scaling.factor) / math.log(scaling.original_length)
                size = scaling.attention_factor or math.sqrt(1 + logs)
                size = (is_long and scaling.long_attention_factor) or size
        frequencies.append(frequency)
    return np.array(frequencies), size


def _yarn(scaling: YarnConfig, h: int, base: float) -> tuple[float, float]:
    def feature(turns: float) -> float:
        return DIM * math.log(scaling.original_length / turns / 2 / math.pi) / 2 / math.log(THETA)

    low, high = feature(scaling.beta_fast), feature(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    share = min(max((h - low) / (high - low), 0), 1)
    sizes = [
        1 + 0.1 * (weight or 1.0) * math.log(scaling.factor)
        for weight in (scaling.mscale, scaling.mscale_all_dim)
    ]
    size = sizes[0] / sizes[1] if scaling.mscale else sizes[0]
    frequency = base * (1 - share) + base / scaling.factor * share
    return frequency, scaling.attention_factor or size


def test_every_scaling_of_the_catalogue_is_compared():
    assert {scaling.name for scaling in SCALINGS.values()} == set(names("rope_scaling"))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_angles_equal_a_loop_over_features(name, length):
    scaling = SCALINGS[name]
    positions = jnp.arange(length, dtype=jnp.int32)[None, :]
    cos, sin = rotary_angles(positions, DIM, THETA, scaling)
    frequencies, size = reference(scaling, length)
    angles = np.arange(length)[:, None] * frequencies
    np.testing.assert_allclose(cos[0, :, 0, : DIM // 2], size * np.cos(angles), atol=2e-5)
    np.testing.assert_allclose(sin[0, :, 0, DIM // 2 :], size * np.sin(angles), atol=2e-5)
    np.testing.assert_array_equal(sin[0, :, 0, : DIM // 2], -sin[0, :, 0, DIM // 2 :])


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_each_row_is_stretched_for_its_own_length(name):
    """A short row beside a long one is turned as alone."""
    short, long = (jnp.arange(12) + jnp.int32(shift) for shift in (0, 20))
    both = rotary_angles(jnp.stack([short, long]), DIM, THETA, SCALINGS[name])
    for row, positions in enumerate((short, long)):
        alone = rotary_angles(positions[None], DIM, THETA, SCALINGS[name])
        for part, single in zip(both, alone, strict=True):
            np.testing.assert_array_equal(part[row], single[0])


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("width", [4, 8])
def test_turned_parts_of_heads_equal_complex_numbers(layout, width):
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype(np.float32)
    positions = jnp.arange(5, dtype=jnp.int32)[None, :] + 3
    turned = rotate_in_place(jnp.asarray(x), rotary_angles(positions, width, 50.0), layout)
    expected = x.copy()
    for h in range(width // 2):
        pair = [2 * h, 2 * h + 1] if layout == "interleaved" else [h, h + width // 2]
        angle = np.exp(1j * (np.arange(5) + 3) * 50.0 ** (-2 * h / width))[None, :, None]
        value = (x[..., pair[0]] + 1j * x[..., pair[1]]) * angle
        expected[..., pair[0]] = value.real
        expected[..., pair[1]] = value.imag
    np.testing.assert_allclose(turned, expected, atol=1e-5)


def test_halves_are_turned_as_by_rotate():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 3, 2, 8)), jnp.bfloat16)
    angles = rotary_angles(jnp.arange(3)[None, :], 8, 50.0)
    lowered = [
        jax.jit(function).lower(x).as_text()
        for function in (
            lambda x: rotate(x, angles),
            lambda x: rotate_in_place(x, angles, "halves"),
        )
    ]
    assert lowered[0] == lowered[1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LinearScalingConfig(factor=0.0), r"rope_scaling\.factor=0\.0 must be above 0"),
        (lambda: DynamicScalingConfig(length=0), r"rope_scaling\.length=0 must be at least 1"),
        (lambda: DynamicScalingConfig().check(1), "rope_scaling:dynamic needs 4 or more features"),
        (
            lambda: Llama3ScalingConfig(high_freq_factor=0.5),
            r"factor=0\.5 must be at least",
        ),
        (lambda: LongRopeConfig(long_factor=(0.0,)), r"long_factor must have divisors above 0"),
        (lambda: LongRopeConfig(long_factor=(1.0,)).check(2), "has 1 divisors, and 2 pairs"),
        (lambda: YarnConfig(mscale=0.0), r"yarn\.mscale=0\.0 must be above 0"),
    ],
)
def test_scalings_that_cannot_be_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_equal_transformers(name, length):
    torch = pytest.importorskip("torch", reason="transformers computes with it")
    utils = pytest.importorskip(
        "transformers.modeling_rope_utils", reason="the comparison is with it"
    )
    transformers = pytest.importorskip("transformers", reason="the comparison is with it")
    scaling = SCALINGS[name]
    fields = dataclasses.asdict(scaling)
    original = fields.pop("original_length", None)
    set_length = fields.pop("length", None)
    rows = fields.pop("rows", None)
    rope = {"rope_type": scaling.name, "rope_theta": THETA, **fields}
    if scaling.name in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = original
    rope = {key: list(v) if isinstance(v, tuple) else v for key, v in rope.items()}
    config = transformers.MixtralConfig(
        head_dim=DIM,
        max_position_embeddings=original if scaling.name == "dynamic" else 4096,
        rope_parameters={key: value for key, value in rope.items() if value is not None},
    )
    positions = set_length or length
    if rows == "long":
        positions = original + 1
    frequencies, size = utils.ROPE_INIT_FUNCTIONS[scaling.name](
        config, torch.device("cpu"), seq_len=positions
    )
    angles = np.arange(length)[:, None] * frequencies.double().numpy()
    ours = rotary_angles(jnp.arange(length, dtype=jnp.int32)[None, :], DIM, THETA, scaling)
    np.testing.assert_allclose(ours[0][0, :, 0, : DIM // 2], size * np.cos(angles), atol=3e-5)
    np.testing.assert_allclose(ours[1][0, :, 0, DIM // 2 :], size * np.sin(angles), atol=3e-5)
