# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The loss of the modules: a plain loop over documents, micro-batches, meshes, what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.multi_token_prediction.config import MultiTokenModulesConfig
from jaxmoe.contrib.multi_token_prediction.objective import MultiTokenPredictionConfig, shift_rows
from jaxmoe.data import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, ModelOptions
from jaxmoe.models.flops import flops_per_token
from jaxmoe.models.transformer import Transformer, initial_router_state
from jaxmoe.optim import adamw
from jaxmoe.routing import LossFreeConfig, SigmoidTopKConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training import NextTokenConfig
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.step import make_train_step
from tests.support.meshes import EXECUTIONS
from tests.support.models import WIDE, WIDE_LENGTH, tokens_for
from tests.support.one_step import params_of, stepped
from tests.support.tolerances import assert_close

DEPTH, VOCAB, WIDTH, HEADS, HEAD = 2, 11, 12, 2, 6
OBJECTIVE = MultiTokenPredictionConfig(weight=0.4)
DENSE = ModelConfig(
    vocab_size=VOCAB,
    num_layers=1,
    embed_dim=WIDTH,
    attention=AttentionConfig(
        num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD, positions="none", qk_norm="none"
    ),
    moe=None,
    dense_dim=10,
    options=ModelOptions(predictor=MultiTokenModulesConfig(depth=DEPTH)),
)
"""One dense layer without positions: what a loop computes in few lines."""


def with_modules(model, depth=DEPTH):
    return dataclasses.replace(
        model, options=ModelOptions(predictor=MultiTokenModulesConfig(depth=depth))
    )


def rows_of(model, length, rows=8):
    """Rows of three documents, the last of which is short, and padding; some weights are 0."""
    drawn = np.random.default_rng(0).integers(model.vocab_size, size=(rows, length + 1))
    rng = np.random.default_rng(1)
    ends = [length // 3, length - 4, length - 3, length]
    segments = np.searchsorted(ends, np.arange(length), side="right") + 1
    segments[segments == len(ends)] = 0
    segments = np.broadcast_to(segments, (rows, length)).astype(np.int32)
    positions = (
        np.arange(length)
        - np.array([0, *ends])[np.searchsorted(ends, np.arange(length), side="right")]
    )
    weights = (rng.random((rows, length)) > 0.25).astype(np.float32)
    weights[:, [end - 1 for end in ends]] = 0.0
    return Batch(
        tokens=drawn[:, :-1].astype(np.int32),
        targets=drawn[:, 1:].astype(np.int32),
        loss_weights=weights,
        segment_ids=segments,
        positions=np.broadcast_to(positions, (rows, length)).astype(np.int32),
    )


def norm(x, gain):
    return x / jnp.sqrt(jnp.mean(x * x) + DENSE.norm_epsilon) * gain


def plain_layer(params, k, xs):
    """One layer over the states of a document, a list of vectors."""

    def matrix(*names):
        leaf = params
        for name in names:
            leaf = leaf[name]
        return leaf[k]

    normed = [norm(x, matrix("attention_norm", "gain")) for x in xs]
    q, keys, values = (
        [jnp.einsum("d,dnh->nh", x, matrix("attention", name)) for x in normed] for name in "qkv"
    )
    after = []
    for i, x in enumerate(xs):
        scores = jnp.stack([(q[i] * keys[j]).sum(-1) / np.sqrt(HEAD) for j in range(i + 1)])
        weights = jax.nn.softmax(scores, axis=0)
        mixed = sum(weights[j][:, None] * values[j] for j in range(i + 1))
        after.append(x + jnp.einsum("nh,nhd->d", mixed, matrix("attention", "o")))
    outputs = []
    for x in after:
        both = jnp.einsum(
            "d,dgf->gf",
            norm(x, matrix("feed_forward_norm", "gain")),
            matrix("feed_forward", "gate_up"),
        )
        outputs.append(x + (jax.nn.silu(both[0]) * both[1]) @ matrix("feed_forward", "down"))
    return outputs


def plain_loss(params, batch):
    """Sum over documents and modules, token by token."""
    table, head = params["embedding"]["weight"], params["head"]["weight"]
    modules = params["further_blocks"]
    total = 0.0
    for row in range(len(batch.tokens)):
        for document in sorted({*batch.segment_ids[row].tolist()} - {0}):
            places = np.flatnonzero(batch.segment_ids[row] == document)
            tokens = batch.tokens[row, places]
            states = plain_layer(params["dense_blocks_0"], 0, [table[t] for t in tokens])
            states = [norm(x, params["final_norm"]["gain"]) for x in states]
            for k in range(1, DEPTH + 1):
                part = {name: leaf for name, leaf in modules.items()}
                inputs = []
                for i in range(len(tokens) - k):
                    token = norm(table[tokens[i + k]], part["token_norm"]["gain"][k - 1])
                    state = norm(states[i], part["state_norm"]["gain"][k - 1])
                    pair = jnp.concatenate([token, state])
                    inputs.append(pair @ part["projection"]["weight"][k - 1])
                states = plain_layer(part, k - 1, inputs)
                for i, x in enumerate(states):
                    logits = norm(x, part["head_norm"]["gain"][k - 1]) @ head
                    place = places[i + k]
                    nll = jax.nn.logsumexp(logits) - logits[batch.targets[row, place]]
                    total += batch.loss_weights[row, place] * nll
    return OBJECTIVE.weight / DEPTH * total


@pytest.mark.parametrize("chunk", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_value_and_gradient_are_those_of_a_loop_over_documents(chunk):
    batch = rows_of(DENSE, 9, rows=1)
    params = params_of(DENSE)
    execution = ExecutionConfig(loss_chunk=chunk)
    plain_batch = jax.tree.map(jnp.asarray, batch)
    prepared = OBJECTIVE.prepare(DENSE, plain_batch, jax.random.key(0), execution.placement)

    def term(params):
        options = {"objective": OBJECTIVE, "train": True, "key": jax.random.key(0)}
        nll, output = forward_and_nll(DENSE, execution, params, prepared, **options)
        plain, _ = forward_and_nll(DENSE, execution, params, plain_batch)
        return nll - plain, output.further["multi_token_prediction"]

    (value, reported), gradient = jax.jit(jax.value_and_grad(term, has_aux=True))(params)
    wanted = jax.jit(jax.value_and_grad(lambda params: plain_loss(params, batch)))(params)
    assert_close((value, gradient), wanted, "end_to_end")
    assert_close(reported, value, "end_to_end")
    assert float(jnp.abs(gradient["dense_blocks_0"]["attention"]["q"]).max()) > 0


def test_tokens_of_another_document_are_not_read():
    tokens = jnp.arange(6)[None]
    arrays = {
        "tokens": tokens,
        "targets": tokens + 1,
        "weights": jnp.asarray([[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]]),
        "segments": jnp.asarray([[1, 1, 1, 2, 2, 0]]),
    }
    shifted = shift_rows(arrays, 2)
    mask = np.asarray(shifted["ahead_mask"])[0].T
    np.testing.assert_array_equal(mask, [[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]])
    weights = np.asarray(shifted["ahead_weights"])[0].T
    np.testing.assert_array_equal(weights, [[1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    read = np.asarray(shifted["ahead_tokens"])[0].T
    np.testing.assert_array_equal(read[:, 0], [1, 2])
    targets = np.asarray(shifted["ahead_targets"])[0].T
    np.testing.assert_array_equal(targets[:, 0], [2, 3])
    assert not np.asarray(shift_rows(arrays, 9)["ahead_mask"])[0, :, 5:].any()


def parts_of(state_and_metrics):
    state, metrics = state_and_metrics
    return metrics.loss, metrics.losses, metrics.grad_norm, state.params, state.router_state


def routed():
    """Two layers of experts with a bias, whose modules have biases of their own."""
    router = SigmoidTopKConfig(bias=LossFreeConfig())
    return with_modules(dataclasses.replace(WIDE, moe=dataclasses.replace(WIDE.moe, router=router)))


@pytest.mark.slow
def test_micro_batches_are_one_batch_and_biases_of_modules_move():
    model = dataclasses.replace(routed(), moe=dataclasses.replace(routed().moe, balancers=()))
    rows = rows_of(model, WIDE_LENGTH)
    whole = stepped(model, rows, objective=OBJECTIVE)
    assert_close(
        parts_of(stepped(model, rows, objective=OBJECTIVE, parts=4)), parts_of(whole), "end_to_end"
    )
    state, metrics = whole
    assert state.router_state["bias"].shape == (4, 8)
    assert np.abs(np.asarray(state.router_state["bias"])).max(axis=1).min() > 0
    assert metrics.load.shape == (4, 8)
    batch = jax.tree.map(jnp.asarray, rows)
    plain, _ = forward_and_nll(model, ExecutionConfig(), params_of(model), batch)
    assert_close(metrics.loss * rows.loss_weights.sum(), plain, "end_to_end")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "data2_expert2_tensor2",
        "fold_expert4_tensor",
        "expert8_all_to_all",
        "tensor4_ring_of_products",
        "seq2_tensor2_all_gather",
        "seq4_ulysses",
        "seq2_expert2_tensor2_ulysses",
        "seq4_ring",
        "seq2_tensor2_ring_by_document",
        "seq4_usp",
    ],
)
def test_a_mesh_computes_the_step_of_one_device(name):
    model = routed()
    rows = rows_of(model, WIDE_LENGTH)
    mine = stepped(model, rows, objective=OBJECTIVE, execution=EXECUTIONS[name])
    assert_close(parts_of(mine), parts_of(stepped(model, rows, objective=OBJECTIVE)), "end_to_end")


def test_logits_and_held_out_loss_do_not_depend_on_the_modules():
    model = with_modules(WIDE)
    params = params_of(model)
    tokens, targets = tokens_for(model, length=WIDE_LENGTH)
    batch = Batch(tokens=tokens, targets=targets, loss_weights=jnp.ones(tokens.shape))
    plain = dataclasses.replace(model, options=None)
    few = {name: leaf for name, leaf in params.items() if name != "further_blocks"}
    np.testing.assert_array_equal(
        Transformer(model).apply({"params": params}, tokens).logits,
        Transformer(plain).apply({"params": few}, tokens).logits,
    )
    losses = [
        forward_and_nll(one, ExecutionConfig(), values, batch, objective=objective)[0]
        for one, values, objective in (
            (model, params, OBJECTIVE),
            (plain, few, NextTokenConfig()),
        )
    ]
    assert losses[0] == losses[1]
    assert not initial_router_state(plain)


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="objective.weight=0.0 must be above 0"):
        MultiTokenPredictionConfig(weight=0.0)
    with pytest.raises(ValueError, match="predictor.depth=0 must be at least 1"):
        MultiTokenModulesConfig(depth=0)
    with pytest.raises(ValueError, match="model.options.predictor is not set: set it to multi_t"):
        make_train_step(WIDE, adamw(learning_rate=1e-2), objective=OBJECTIVE)


def test_a_module_costs_a_layer_a_head_and_a_projection():
    plain = dataclasses.replace(DENSE, options=None)
    one, two, none = (
        flops_per_token(model, parameter_table(model), 8)
        for model in (with_modules(DENSE, 1), with_modules(DENSE, 2), plain)
    )
    layer = sum(
        row.size
        for row in parameter_table(plain)
        if row.path.startswith("dense_blocks_0") and row.declaration.role != "norm"
    )
    mixing = none - 6.0 * (layer + WIDTH * VOCAB)
    assert two - one == one - none
    assert one - none == 6.0 * (layer + WIDTH * VOCAB + 2 * WIDTH**2) + mixing
