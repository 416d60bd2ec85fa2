# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Masked diffusion: the bound of a perfect denoiser is the entropy, and its samples have the law.

The perfect denoiser of a Markov chain is the forward-backward algorithm. What it shows of objective
and sampler holds for every model; the slow test at the end trains one.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.diffusion.diffuse import ancestral, diffuse
from jaxmoe.contrib.diffusion.masked_diffusion import radical_inverse
from jaxmoe.data import Batch, MarkovConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.decode import generate
from jaxmoe.models.sampling import SamplingConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.routing import ExpertChoiceConfig, RouterZConfig, SoftmaxGateConfig
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training import MaskedDiffusionConfig, NextTokenConfig
from jaxmoe.training.cross_entropy import token_nll
from jaxmoe.training.evaluate import evaluate, make_eval_step
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding.distributed import global_batch
from tests.support.meshes import MESHES, mesh_named
from tests.support.models import TINY
from tests.support.tolerances import assert_close

SYMBOLS, LENGTH = 4, 16
LANGUAGE = MarkovConfig(vocab_size=SYMBOLS)
PLACEMENT = ExecutionConfig().placement
MODEL = dataclasses.replace(
    TINY,
    vocab_size=SYMBOLS + 1,
    attention=dataclasses.replace(TINY.attention, is_causal=False),
    moe=MoEConfig(
        num_experts=4,
        top_k=2,
        expert_dim=10,
        router=ExpertChoiceConfig(schedule="linear_reverse"),
        gate=SoftmaxGateConfig(),
        balancers=(RouterZConfig(),),
    ),
)
CAUSAL = dataclasses.replace(TINY, vocab_size=SYMBOLS + 1)
OBJECTIVE = MaskedDiffusionConfig()


@functools.cache
def chain_of(language):
    return language.build(0).chains[0]


def rows_of(language, number, length, seed=0):
    """[number length] tokens, drawn column by column."""
    chain, rng = chain_of(language), np.random.default_rng(seed)
    contexts, symbols = chain.transitions.shape
    context = rng.choice(contexts, p=chain.stationary / chain.stationary.sum(), size=number)
    columns = [context // symbols, context % symbols]
    below = chain.transitions.cumsum(1)
    while len(columns) < length:
        drawn = (below[context] < rng.random(number)[:, None]).sum(1)
        columns.append(np.minimum(drawn, symbols - 1))
        context = (context * symbols + columns[-1]) % contexts
    return np.stack(columns, axis=1).astype(np.int32)


def batch_of(tokens, segment_ids=None):
    ones = np.ones(tokens.shape, np.float32)
    return Batch(tokens=tokens, targets=tokens, loss_weights=ones, segment_ids=segment_ids)


def perfect_denoiser(language):
    """(tokens with masks, ratio) -> exact log p(x_s | what is left of the row), -inf for the mask.

    Forward and backward messages over pairs of neighbours.
    """
    chain = chain_of(language)
    symbols = chain.transitions.shape[1]
    law = jnp.asarray(chain.transitions.reshape(symbols, symbols, symbols), jnp.float32)
    first = jnp.asarray(chain.stationary.reshape(symbols, symbols), jnp.float32)

    def denoise(tokens, ratio):
        del ratio
        known = jax.nn.one_hot(tokens, symbols)
        allowed = jnp.where((tokens == symbols)[:, :, None], 1.0, known).swapaxes(0, 1)  # S B V

        def normed(message):
            return message / message.sum((1, 2), keepdims=True)

        def forward(message, allowed):
            following = jnp.einsum("bij,ijk,bk->bjk", message, law, allowed)
            return normed(following), message

        def backward(message, allowed):
            preceding = jnp.einsum("bjk,ijk,bk->bij", message, law, allowed)
            return normed(preceding), message

        start = first[None] * allowed[0][:, :, None] * allowed[1][:, None, :]
        last, before = jax.lax.scan(forward, normed(start), allowed[2:])
        alphas = jnp.concatenate([before, last[None]])  # pairs (s, s + 1)
        ones = jnp.ones_like(start)
        final, after = jax.lax.scan(backward, ones, allowed[2:], reverse=True)
        betas = jnp.concatenate([final[None], after])
        pairs = alphas * betas
        marginals = jnp.concatenate([pairs[:1].sum(3), pairs.sum(2)])  # S B V
        marginals = marginals / marginals.sum(2, keepdims=True)
        logits = jnp.log(jnp.maximum(marginals, 1e-30)).swapaxes(0, 1)
        return jnp.pad(logits, ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)

    return denoise


def test_the_denoiser_is_bayes_by_enumeration():
    language = MarkovConfig(vocab_size=3)
    chain, mask = chain_of(language), 3
    tokens = np.array([[mask, 1, mask, mask, 2], [mask] * 5], np.int32)
    logits = np.asarray(perfect_denoiser(language)(jnp.asarray(tokens), None))
    for row, seen in enumerate(tokens):
        joint = np.zeros((5, 3))
        for index in np.ndindex(*(3,) * 5):
            if all(s in (mask, t) for s, t in zip(seen, index, strict=True)):
                p = chain.stationary[index[0] * 3 + index[1]]
                for s in range(2, 5):
                    p *= chain.transitions[index[s - 2] * 3 + index[s - 1], index[s]]
                for s in range(5):
                    joint[s, index[s]] += p
        wanted = joint / joint.sum(1, keepdims=True)
        np.testing.assert_allclose(np.exp(logits[row, :, :3]), wanted, atol=1e-5)


@pytest.mark.parametrize("law", [pytest.param("drawn", marks=pytest.mark.slow), "counted"])
def test_the_bound_of_a_perfect_denoiser_is_the_entropy(law):
    """Within four standard errors of the mean over rows; and never below what it estimates."""
    rows, denoise = 512, perfect_denoiser(LANGUAGE)

    @jax.jit
    def bits(tokens, index):
        batch = batch_of(tokens)
        if law == "drawn":
            key = jax.random.fold_in(jax.random.key(7), index)
            masked = OBJECTIVE.prepare(MODEL, batch, key, PLACEMENT)
        else:
            masked = OBJECTIVE.examine(MODEL, batch, index, PLACEMENT)
        logits = denoise(masked.tokens, masked.mask_ratio)
        weights = jnp.where(masked.tokens == SYMBOLS, masked.loss_weights, 0.0)
        nll = jnp.where(weights > 0, token_nll(logits, masked.targets), 0.0)
        return jnp.sum(nll * weights, axis=1) / LENGTH / math.log(2.0)

    of_rows = np.concatenate(
        [
            np.mean(
                [bits(rows_of(LANGUAGE, rows, LENGTH, seed), jnp.int32(i)) for i in range(8)], 0
            )
            for seed in range(8)
        ]
    )
    floor = chain_of(LANGUAGE).whole_row_bits_per_token(LENGTH)
    error = of_rows.std() / math.sqrt(of_rows.size)
    assert error < 0.02 and abs(of_rows.mean() - floor) < 4 * error


def test_what_is_masked_and_what_it_weighs():
    tokens = rows_of(LANGUAGE, 8, LENGTH)
    segment_ids = np.ones((8, LENGTH), np.int32)
    segment_ids[2, 9:] = 0
    segment_ids[5] = 0
    real = segment_ids != 0
    given = batch_of(tokens, segment_ids)
    prepare = jax.jit(lambda key: OBJECTIVE.prepare(MODEL, given, key, PLACEMENT))
    for seed in range(20):
        batch = jax.tree.map(np.asarray, prepare(jax.random.key(seed)))
        is_masked = batch.tokens == SYMBOLS
        assert not is_masked[~real].any()
        assert (batch.tokens == np.where(is_masked, SYMBOLS, tokens)).all()
        assert (batch.targets == tokens).all()
        time = batch.mask_ratio[:, :1]
        assert (batch.mask_ratio == time).all() and (time >= OBJECTIVE.min_time).all()
        assert_close(batch.loss_weights, np.where(is_masked, 1.0 / time, 0.0), "elementwise")
        # One row in each eighth of the times.
        offset = (time.ravel() - OBJECTIVE.min_time) / (1 - OBJECTIVE.min_time)
        assert len(set(np.floor(offset * 8).tolist())) >= 7  # the turn may stand on a boundary
    assert OBJECTIVE.num_tokens(given) == float(real.sum())


def test_masks_are_drawn_with_the_probability_of_the_row():
    rows = 4096
    batch = OBJECTIVE.prepare(
        MODEL, batch_of(np.zeros((rows, LENGTH), np.int32)), jax.random.key(3), PLACEMENT
    )
    time = np.asarray(batch.mask_ratio[:, 0])
    share = np.asarray(batch.tokens == SYMBOLS).mean(1)
    for low in np.arange(0, 1, 0.125):
        point = (time - OBJECTIVE.min_time) / (1 - OBJECTIVE.min_time)
        rows_here = (point >= low) & (point < low + 0.125)
        assert abs(rows_here.sum() - rows / 8) <= 2  # stratified, not merely uniform
        error = math.sqrt(0.25 / rows_here.sum() / LENGTH)
        assert abs(share[rows_here].mean() - time[rows_here].mean()) < 4 * error


def test_held_out_rows_have_a_given_number_of_masks():
    tokens = rows_of(LANGUAGE, 8, LENGTH)
    segment_ids = np.ones((8, LENGTH), np.int32)
    segment_ids[1, 5:] = 0
    segment_ids[3] = 0
    lengths = (segment_ids != 0).sum(1)
    numbers = []
    for index in range(OBJECTIVE.eval_times):
        twice = [
            OBJECTIVE.examine(MODEL, batch_of(tokens, segment_ids), jnp.int32(index), PLACEMENT)
            for _ in range(2)
        ]
        assert_close(twice[0], twice[1], "elementwise")
        is_masked = np.asarray(twice[0].tokens == SYMBOLS)
        number = is_masked.sum(1)
        assert ((number >= np.minimum(1, lengths)) & (number <= lengths)).all()
        weights = np.where(is_masked, (lengths / np.maximum(number, 1))[:, None], 0.0)
        assert_close(twice[0].loss_weights, weights, "elementwise")
        numbers.append(number)
    # Spread evenly: each of the eight times of a row of 16 masks two more.
    assert (np.diff(np.stack(numbers)[:, 0]) == LENGTH // OBJECTIVE.eval_times).all()


def test_radical_inverse():
    points = np.asarray(radical_inverse(jnp.arange(8, dtype=jnp.int32)), np.float64) / 2**32
    assert points.tolist() == [0.0, 0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]


@pytest.mark.slow
def test_the_mask_is_never_predicted():
    """A head that is sure of the mask says nothing else than one that is not, and learns nothing
    of it."""
    params = init_params(MODEL, jax.random.key(0))
    batch = OBJECTIVE.prepare(
        MODEL, batch_of(rows_of(LANGUAGE, 8, LENGTH)), jax.random.key(1), PLACEMENT
    )

    @jax.jit
    def loss(params):
        return forward_and_nll(MODEL, ExecutionConfig(), params, batch, objective=OBJECTIVE)[0]

    sure = jax.tree.map(jnp.array, params)
    sure["head"]["weight"] = sure["head"]["weight"].at[:, -1].set(100.0)
    assert loss(sure) == loss(params)
    gradient = jax.jit(jax.grad(loss))(params)
    assert (gradient["head"]["weight"][:, -1] == 0.0).all()
    assert np.abs(gradient["embedding"]["weight"][-1]).max() > 0.0  # it is read
    filled = diffuse(
        MODEL,
        sure,
        jnp.zeros((4, LENGTH), jnp.int32),
        jnp.zeros((4, LENGTH), bool),
        num_steps=4,
        keys=jax.random.split(jax.random.key(0), 4),
    )
    assert np.asarray(filled).max() < SYMBOLS


# Without experts: an untrained model sees all masks much alike, and rounding then decides which of
# them an expert takes. Routers on meshes have tests of their own.
DENSE = dataclasses.replace(MODEL, moe=None, dense_dim=24)
# A large epsilon keeps Adam's division from blowing rounding up.
OPTIMIZER = AdamWConfig(learning_rate=0.01, epsilon=1e-2).build(
    parameter_table(DENSE), LinearConfig(floor=1.0).build(1000)
)


def two_steps(mesh_name=None, accumulation=1):
    """Losses of two steps, a held-out loss after them, and the parameters."""
    mesh = None if mesh_name is None else mesh_named(mesh_name)
    execution = ExecutionConfig() if mesh is None else ExecutionConfig(mesh=MESHES[mesh_name])
    batch = batch_of(rows_of(LANGUAGE, 8, LENGTH))
    batch = batch if mesh is None else global_batch(batch, mesh)
    with jax.set_mesh(mesh) if mesh is not None else jax.enable_x64(False):
        step = make_train_step(
            DENSE, OPTIMIZER, execution=execution, accumulation=accumulation, objective=OBJECTIVE
        )
        state = init_state(DENSE, OPTIMIZER, jax.random.key(2), execution=execution, mesh=mesh)
        losses = []
        for _ in range(2):
            state, metrics = step(state, batch)
            losses.append((metrics.loss, metrics.num_tokens))
        held_out = make_eval_step(DENSE, execution=execution, objective=OBJECTIVE)
        last = held_out(state.params, state.router_state, batch)
    return losses, last, state.params


@pytest.fixture(scope="module")
def plain():
    return two_steps()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["replica2_data2_expert2"])
def test_the_same_on_every_mesh(mesh, plain):
    assert_close(two_steps(mesh), plain, "end_to_end")


@pytest.mark.slow
def test_accumulation_changes_nothing(plain):
    """Rows keep their times and masks."""
    assert_close(two_steps(accumulation=2), plain, "end_to_end")


def bigrams(rows, symbols):
    pairs = rows[:, :-1] * symbols + rows[:, 1:]
    return np.bincount(pairs.ravel(), minlength=symbols**2) / pairs.size


def total_variation_and_its_error(rows, language):
    """Distance of the bigrams from their exact law; the mean of what as many true rows would
    show."""
    chain = chain_of(language)
    symbols = chain.transitions.shape[1]
    distance = 0.5 * np.abs(bigrams(rows, symbols) - chain.stationary).sum()
    honest = [
        0.5
        * np.abs(bigrams(rows_of(language, *rows.shape, seed), symbols) - chain.stationary).sum()
        for seed in range(100, 110)
    ]
    return distance, float(np.mean(honest))


def test_samples_of_a_perfect_denoiser_have_the_law_of_the_language():
    number, given = 512, np.zeros((512, LENGTH), bool)
    denoise = perfect_denoiser(LANGUAGE)
    sampler = jax.jit(
        lambda tokens, is_given, key: ancestral(
            lambda tokens, ratio: (denoise(tokens, ratio), None),
            lambda logits: logits,
            tokens,
            is_given,
            mask_token=SYMBOLS,
            num_steps=jnp.int32(128),
            keys=jax.random.split(key, number),
            limits=SamplingConfig().limits(SYMBOLS + 1),
        )
    )
    tokens = jnp.zeros((number, LENGTH), jnp.int32)
    rows = np.asarray(sampler(tokens, jnp.asarray(given), jax.random.key(0)))
    assert rows.min() >= 0 and rows.max() < SYMBOLS
    distance, error = total_variation_and_its_error(rows, LANGUAGE)
    assert distance < 2 * error
    # A prompt, here every other token, stays as it is; the rest still fits it.
    truth = rows_of(LANGUAGE, number, LENGTH, 1)
    given[:, ::2] = True
    rows = np.asarray(sampler(jnp.asarray(truth), jnp.asarray(given), jax.random.key(1)))
    assert (rows[given] == truth[given]).all() and (rows != truth).any()
    distance, error = total_variation_and_its_error(rows, LANGUAGE)
    assert distance < 2 * error


@pytest.mark.slow
def test_documents_and_padding_are_not_seen_without_causality():
    """Two documents packed in a row are what they are alone, in value and gradient."""
    model = dataclasses.replace(MODEL, moe=TINY.moe)
    params = init_params(model, jax.random.key(0))
    tokens = jnp.asarray(rows_of(LANGUAGE, 1, 11))
    packed = jnp.asarray([[1] * 4 + [2] * 5 + [0] * 2], jnp.int32)
    positions = jnp.asarray([[*range(4), *range(5), 0, 0]], jnp.int32)

    @jax.jit
    def hidden(params, tokens, segment_ids, positions):
        transformer = Transformer(model).apply
        output = transformer(
            {"params": params}, tokens, segment_ids=segment_ids, positions=positions
        )
        return output.logits

    together = hidden(params, tokens, packed, positions)
    for start, end in ((0, 4), (4, 9)):
        part = slice(start, end)
        alone = hidden(params, tokens[:, part], packed[:, part], positions[:, part])
        assert_close(together[:, part], alone, "other_length")
    moved = hidden(params, tokens.at[0, 8].set(SYMBOLS).at[0, 10].set(SYMBOLS), packed, positions)
    assert_close(moved[:, :4], together[:, :4], "elementwise")
    assert np.abs(moved[:, 4] - together[:, 4]).max() > 1e-3  # it sees what follows


def test_what_does_not_fit_is_refused():
    def refused(text, build):
        with pytest.raises(ValueError, match=re.escape(text)):
            build()

    tokens, none = jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4), bool)
    key = jax.random.key(0)
    refused("objective.min_time=0.0 must lie", lambda: MaskedDiffusionConfig(min_time=0.0))
    refused("objective.eval_times=0 must be", lambda: MaskedDiffusionConfig(eval_times=0))
    refused(
        "model.attention.is_causal=True hides all that follows",
        lambda: make_train_step(CAUSAL, OPTIMIZER, objective=OBJECTIVE),
    )
    refused(
        "set training.objective to masked_diffusion",
        lambda: make_eval_step(MODEL, objective=NextTokenConfig()),
    )
    refused(
        "cannot write from left to right",
        lambda: generate(MODEL, {}, tokens, num_tokens=1, key=key),
    )
    given = {"num_steps": 1, "keys": key[None]}
    refused("cannot fill it", lambda: diffuse(CAUSAL, {}, tokens, none, **given))
    refused("num_steps=0", lambda: diffuse(MODEL, {}, tokens, none, **given | {"num_steps": 0}))
    refused("budget=0", lambda: diffuse(MODEL, {}, tokens, none, **given, budget=0))
    refused(
        "a cache of them would be wrong",
        lambda: Transformer(MODEL).apply(
            {"params": init_params(MODEL, key)},
            tokens,
            positions=tokens,
            context={"mask_ratio": tokens.astype(jnp.float32)},
            cache=initial_cache(MODEL, ExecutionConfig(), batch=1, length=4),
        ),
    )


@pytest.mark.large
@pytest.mark.slow
def test_a_trained_model_is_near_the_entropy_and_its_samples_have_the_law():
    """Expert choice, capacity linear_reverse, on an order-2 language: symbols alone cost 1.89
    bits, given the one before 1.67, and the entropy of whole rows is 1.12."""
    language = MarkovConfig(vocab_size=SYMBOLS, concentration=0.5)
    length, steps, rows = 32, 1000, 32
    model = ModelConfig(
        vocab_size=SYMBOLS + 1,
        num_layers=2,
        embed_dim=96,
        attention=AttentionConfig(
            num_heads=6, num_kv_heads=6, head_dim=16, rope_theta=50.0, window=5, is_causal=False
        ),
        moe=dataclasses.replace(MODEL.moe, expert_dim=192),
    )
    objective = MaskedDiffusionConfig(min_time=0.05)
    schedule = LinearConfig(warmup_steps=20, floor=0.02).build(steps)
    optimizer = AdamWConfig(learning_rate=5e-3).build(parameter_table(model), schedule)
    execution = ExecutionConfig(unroll=2)
    step = make_train_step(model, optimizer, execution=execution, objective=objective)
    state = init_state(model, optimizer, jax.random.key(0))
    for seed in range(steps):
        state, metrics = step(state, batch_of(rows_of(language, rows, length, seed)))
    assert metrics.skipped_in_a_row == 0
    held_out = [batch_of(rows_of(language, 64, length, 10**6 + seed)) for seed in range(16)]
    eval_step = make_eval_step(model, execution=execution, objective=objective)
    bits = evaluate(eval_step, state.params, state.router_state, held_out).bits_per_token
    floor = chain_of(language).whole_row_bits_per_token(length)
    assert abs(floor - 1.12) < 0.005
    # Not below by more than the scatter of 1024 rows.
    assert -0.03 < bits - floor < 0.1, f"{bits:.4f} against {floor:.4f}"
    none = jnp.zeros((512, length), bool)
    samples = diffuse(
        model,
        state.params,
        none.astype(jnp.int32),
        none,
        num_steps=4 * length,
        keys=jax.random.split(jax.random.key(1), 512),
        router_state=state.router_state,
    )
    # As many rows of the language itself are 0.009 away by chance, and independent symbols 0.22.
    distance, error = total_variation_and_its_error(np.asarray(samples), language)
    alone = bigrams(rows_of(language, 512, length), SYMBOLS).reshape(SYMBOLS, SYMBOLS)
    alone = np.outer(alone.sum(1), alone.sum(0)).ravel()
    independent = 0.5 * np.abs(alone - chain_of(language).stationary).sum()
    assert distance < 0.04 < 0.2 * independent, f"{distance:.4f}, chance {error:.4f}"
