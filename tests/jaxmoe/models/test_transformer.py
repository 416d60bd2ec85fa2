# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The whole forward pass against float64 numpy with loops over layers, heads and experts.

Gradients are checked against central differences of the same oracle, parameter by parameter: it
shares no line with the model, its derivatives included.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.records import LayerInputs, Stream, TokenInputs
from jaxmoe.models.config import AttentionConfig, ForwardMultipliers, ModelConfig, MoEConfig
from jaxmoe.models.embedding import output_logits
from jaxmoe.models.transformer import Transformer, initial_router_state
from jaxmoe.routing import SoftmaxTopKConfig, SqrtGateConfig
from jaxmoe.routing.routers.token_choice.token_choice import TokenChoice
from jaxmoe.scaling.initialize import parameter_table
from tests.support.tolerances import assert_close

LENGTH, VOCAB = 8, 32

PLAIN = ModelConfig(
    vocab_size=VOCAB,
    num_layers=2,
    embed_dim=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8),
)
RICH = ModelConfig(
    vocab_size=VOCAB,
    num_layers=3,
    embed_dim=16,
    attention=AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=4, qk_norm="full", is_gated=True, window=4
    ),
    moe=MoEConfig(
        num_experts=4, top_k=2, expert_dim=8, num_shared_experts=2, gate=SqrtGateConfig()
    ),
    dense_layers=(1,),
    dense_dim=24,
    has_tied_embeddings=True,
    multipliers=ForwardMultipliers(
        embedding=3.0, residual=0.7, logits=0.5, router=1.3, attention_scale=0.4
    ),
)
MODELS = {"plain": PLAIN, "rich": RICH}

# Row 0 packs two documents, rows 1 and 2 hold them alone, row 3 is one document.
SEGMENT_IDS = np.array([[1] * 5 + [2] * 3, [1] * 5 + [0] * 3, [7] * 3 + [0] * 5, [1] * 8], np.int32)
POSITIONS = np.array([[0, 1, 2, 3, 4, 0, 1, 2], *[range(8)] * 3], np.int32)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, SEGMENT_IDS.shape).astype(np.int32)
TOKENS[1, :5], TOKENS[2, :3] = TOKENS[0, :5], TOKENS[0, 5:]


def _params(model: ModelConfig) -> dict:
    """f32 numbers of every parameter's shape and scale; gains differ from 1."""
    rng = np.random.default_rng(1)

    def value(row):
        noise = rng.standard_normal(row.shape)
        fan_in = row.declaration.fan(0)
        is_gain = row.declaration.init == "ones"
        return jnp.asarray(1 + 0.2 * noise if is_gain else noise / fan_in**0.5, jnp.float32)

    return parameter_table(model).tree(value)


# The oracle.


def _norm(x, gain, epsilon):
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def _softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _swiglu(x, weights):
    gate, up = x @ weights["gate_up"][:, 0], x @ weights["gate_up"][:, 1]
    return (gate * _sigmoid(gate) * up) @ weights["down"]


def _turn(head, positions, theta):
    half = head.shape[-1] // 2
    angles = positions[..., None] * theta ** (-np.arange(half) / half)
    turned = (head[..., :half] + 1j * head[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def _attention(x, weights, model, positions, segment_ids):
    config, result = model.attention, 0.0
    heads = {name: np.einsum("bsd,dnh->bsnh", x, weights[name]) for name in "qkv"}
    for name in "qk":
        h = heads[name]
        flat = h.reshape(*h.shape[:2], -1) if config.qk_norm == "full" else h
        heads[name] = _norm(flat, weights[f"{name}_norm"], model.norm_epsilon).reshape(h.shape)
    distance = positions[:, :, None] - positions[:, None, :]
    sees = (distance >= 0) & (distance < (config.window or LENGTH))
    sees &= segment_ids[:, :, None] == segment_ids[:, None, :]
    scale = model.forward_multipliers.attention_scale or config.head_dim**-0.5
    for n in range(config.num_heads):
        m = n // (config.num_heads // config.num_kv_heads)
        q = _turn(heads["q"][:, :, n], positions, config.rope_theta)
        k = _turn(heads["k"][:, :, m], positions, config.rope_theta)
        scores = np.where(sees, scale * q @ k.swapaxes(1, 2), -np.inf)
        out = _softmax(scores) @ heads["v"][:, :, m]
        if config.is_gated:
            out = out * _sigmoid(x @ weights["gate"][:, n])[..., None]
        result = result + out @ weights["o"][n]
    return result


def _moe(x, weights, model, is_real):
    """Every expert computes every token, and a gate of 0 hides it."""
    moe = model.moe
    logits = model.forward_multipliers.router * x @ weights["router"]["weight"]
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., : moe.top_k]
    is_chosen = (chosen[..., None] == np.arange(moe.num_experts)).any(-2) & is_real[..., None]
    with np.errstate(invalid="ignore"):
        gates = np.where(is_chosen, _softmax(np.where(is_chosen, logits, -np.inf)), 0.0)
    is_sqrt = moe.gate == SqrtGateConfig()
    gates = np.sqrt(gates) if is_sqrt else gates
    y = 0.0
    for e in range(moe.num_experts):
        expert = jax.tree.map(lambda w, e=e: w[e], weights["experts"])
        y = y + gates[..., e : e + 1] * _swiglu(x, expert)
    if moe.num_shared_experts:
        y = np.sqrt(0.5 if is_sqrt else 1.0) * (y + _swiglu(x, weights["shared"]))
    counts = is_chosen.sum((0, 1))
    prob_sum = (_softmax(logits) * is_real[..., None]).sum((0, 1))
    z = np.log(np.exp(logits).sum(-1))
    balance = moe.num_experts * (counts / counts.sum()) @ (prob_sum / is_real.sum())
    return y, counts, 0.01 * balance + 0.001 * (z**2 * is_real).sum() / is_real.sum()


def oracle(params, model, positions, segment_ids):
    """Logits, the balancers' losses summed, and the counts of each MoE layer."""
    multipliers, epsilon = model.forward_multipliers, model.norm_epsilon
    table = params["embedding"]["weight"]
    x, loss, counts = multipliers.embedding * table[TOKENS], 0.0, []
    for layer in range(model.num_layers):
        stack = next(s for s in model.stacks if layer in s.layers)
        place = stack.layers.index(layer)
        weights = jax.tree.map(lambda w, i=place: w[i], params[stack.path])
        y = _norm(x, weights["attention_norm"]["gain"], epsilon)
        y = _attention(y, weights["attention"], model, positions, segment_ids)
        x = x + multipliers.residual * y
        y = _norm(x, weights["feed_forward_norm"]["gain"], epsilon)
        if model.moe is None or layer in model.dense_layers:
            y = _swiglu(y, weights["feed_forward"])
        else:
            y, count, part = _moe(y, weights["moe"], model, segment_ids != 0)
            counts.append(count)
            loss += part
        x = x + multipliers.residual * y
    x = _norm(x, params["final_norm"]["gain"], epsilon)
    head = table.T if model.has_tied_embeddings else params["head"]["weight"]
    return multipliers.logits * x @ head, loss, np.array(counts)


# The model under test: one compiled function per model, shared by the tests.

COTANGENT = np.random.default_rng(2).standard_normal((*TOKENS.shape, VOCAB)).astype(np.float32)
COTANGENT *= SEGMENT_IDS[..., None] != 0


def _compiled(model: ModelConfig, execution: ExecutionConfig | None = None):
    """(params, tokens, positions, segment_ids) -> ((number, Output), gradients)."""

    def number(params, tokens, positions, segment_ids):
        output = Transformer(model, execution or ExecutionConfig()).apply(
            {"params": params}, tokens, positions=positions, segment_ids=segment_ids
        )
        return jnp.sum(output.logits * COTANGENT) + sum(output.losses.values()), output

    return jax.jit(jax.value_and_grad(number, has_aux=True))


@pytest.fixture(scope="module")
def plain():
    return _compiled(PLAIN)


@pytest.mark.parametrize("name", MODELS)
def test_transformer_equals_numpy_oracle(name, plain):
    model, params = MODELS[name], _params(MODELS[name])
    function = plain if name == "plain" else _compiled(model)
    (_, output), grads = function(params, TOKENS, POSITIONS, SEGMENT_IDS)
    is_real = SEGMENT_IDS != 0

    def number(params):
        logits, loss, _ = oracle(params, model, POSITIONS, SEGMENT_IDS)
        return (logits * COTANGENT).sum() + loss

    wide = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    logits, loss, counts = oracle(wide, model, POSITIONS, SEGMENT_IDS)
    assert_close(np.asarray(output.logits)[is_real], logits[is_real], kind="end_to_end")
    assert_close(sum(output.losses.values()), loss, kind="end_to_end")
    np.testing.assert_array_equal(output.statistics.counts, counts)
    np.testing.assert_array_equal(output.statistics.num_tokens, [is_real.sum()] * len(counts))

    leaves, tree = jax.tree.flatten(wide)
    rng, step = np.random.default_rng(3), 1e-6
    got, wanted = [], []
    for i, grad in enumerate(jax.tree.leaves(grads)):
        direction = rng.standard_normal(grad.shape)
        ends = [
            number(
                jax.tree.unflatten(
                    tree, [*leaves[:i], leaves[i] + sign * step * direction, *leaves[i + 1 :]]
                )
            )
            for sign in (1, -1)
        ]
        got.append((np.asarray(grad, np.float64) * direction).sum())
        wanted.append((ends[0] - ends[1]) / (2 * step))
    assert_close(got, wanted, kind="end_to_end")


def test_stacks_are_runs_of_equal_layers():
    dense = dataclasses.replace(RICH, num_layers=6, dense_layers=(0, 3, 4))
    names = [(stack.path, stack.num_layers) for stack in dense.stacks]
    assert names == [
        ("dense_blocks_0", 1),
        ("moe_blocks_1", 2),
        ("dense_blocks_3", 2),
        ("moe_blocks_5", 1),
    ]
    assert dense.num_moe_layers == 3
    assert {row.path.split("/")[0] for row in parameter_table(dense)} == {
        *(name for name, _ in names),
        "embedding",
        "final_norm",
    }


def test_a_later_token_changes_no_earlier_logit(plain):
    params = _params(PLAIN)
    ones, positions = np.ones_like(SEGMENT_IDS), np.tile(POSITIONS[1:2], (4, 1))
    before = plain(params, TOKENS, positions, ones)[0][1].logits
    for place in range(1, LENGTH):
        tokens = TOKENS.copy()
        tokens[:, place] = (tokens[:, place] + 1) % VOCAB
        after = plain(params, tokens, positions, ones)[0][1].logits
        np.testing.assert_array_equal(before[:, :place], after[:, :place])
        assert (np.asarray(before[:, place]) != np.asarray(after[:, place])).any(-1).all()


def test_packed_documents_equal_separate_rows(plain):
    """With other documents, padding or nothing beside it, a document gives the same logits."""
    logits = plain(_params(PLAIN), TOKENS, POSITIONS, SEGMENT_IDS)[0][1].logits
    assert_close(logits[0, :5], logits[1, :5], kind="end_to_end")
    assert_close(logits[0, 5:], logits[2, :3], kind="end_to_end")


def test_arguments_left_out_are_one_document_a_row(plain):
    params, row = _params(PLAIN), slice(3, 4)
    whole = plain(params, TOKENS, POSITIONS, SEGMENT_IDS)[0][1].logits[row]
    output = jax.jit(Transformer(PLAIN).apply)({"params": params}, TOKENS[row])
    assert_close(output.logits, whole, kind="end_to_end")
    assert output.cache is None


def test_scan_equals_a_loop(plain):
    params = _params(PLAIN)
    about = TokenInputs(
        positions=jnp.asarray(POSITIONS),
        segment_ids=jnp.asarray(SEGMENT_IDS),
        token_mask=jnp.asarray(SEGMENT_IDS != 0),
        context={},
    )
    block = Block(PLAIN.attention, PLAIN.moe, PLAIN.context, ExecutionConfig(), train=False)
    apply = jax.jit(lambda weights, flow, about: block.apply({"params": weights}, flow, *about))
    flow, counts = Stream(x=jnp.asarray(params["embedding"]["weight"])[TOKENS]), []
    for layer in range(PLAIN.num_layers):
        weights = jax.tree.map(lambda w, i=layer: w[i], params["moe_blocks_0"])
        given = LayerInputs(
            router_state={}, key=None, stack_layer=jnp.int32(layer), moe_layer=jnp.int32(layer)
        )
        flow, outputs = apply(weights, flow, (given, about))
        counts.append(outputs.statistics.counts)
    x = rms_norm(flow.x, jnp.asarray(params["final_norm"]["gain"]), PLAIN.norm_epsilon)
    head = jnp.asarray(params["head"]["weight"])
    wanted = plain(params, TOKENS, POSITIONS, SEGMENT_IDS)[0][1]
    assert_close(output_logits(x, head, PLAIN, ExecutionConfig()), wanted.logits, kind="end_to_end")
    np.testing.assert_array_equal(wanted.statistics.counts, counts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BiasedConfig(SoftmaxTopKConfig):
    """A router whose state is added to its logits."""

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> "Biased":
        return Biased(self, num_experts, top_k, embed_dim)


@dataclasses.dataclass(frozen=True)
class Biased(TokenChoice):
    def init(self, key):
        params, _ = super().init(key)
        return params, {"bias": jnp.zeros((self.num_experts,), jnp.float32)}

    def route(self, params, state, inputs, *, train, key):
        noise = 0.0 if key is None else 1e3 * jax.random.normal(key, (self.num_experts,))
        shifted = {"weight": 0.0 * params["weight"] + (state["bias"] + noise)[None, :]}
        ones = jnp.full_like(inputs.x, 1 / self.embed_dim)
        return super().route(shifted, {}, inputs.replace(x=ones), train=train, key=key)


def test_every_layer_gets_its_own_router_state_and_key():
    """Each MoE layer's state sends all tokens to one expert; a dense layer is between them."""
    moe = dataclasses.replace(RICH.moe, router=BiasedConfig(), top_k=1)
    model = dataclasses.replace(RICH, moe=moe)
    state = initial_router_state(model)
    assert state["bias"].shape == (2, 4) and not state["bias"].any()

    @jax.jit
    def counts(bias, key):
        output = Transformer(model).apply(
            {"params": _params(model)}, jnp.asarray(TOKENS), router_state={"bias": bias}, key=key
        )
        return output.statistics.counts

    bias = 1e6 * jnp.eye(4, dtype=jnp.float32)[jnp.asarray([3, 1])]
    got = counts(bias, jax.random.key(0))
    np.testing.assert_array_equal(got, TOKENS.size * np.eye(4)[[3, 1]])
    by_noise = np.array([counts(jnp.zeros((2, 4)), jax.random.key(i)) for i in range(8)])
    assert (by_noise.argmax(-1)[:, 0] != by_noise.argmax(-1)[:, 1]).any()
    assert len({tuple(choice) for choice in by_noise.argmax(-1)}) > 1


def test_dense_model_has_no_statistics_or_losses():
    model = dataclasses.replace(PLAIN, moe=None, dense_dim=16)

    def shapes(params):
        output = Transformer(model).apply({"params": params}, jnp.asarray(TOKENS))
        assert output.losses == {} and output.statistics is None
        return output.logits

    assert jax.eval_shape(shapes, _params(model)).shape == (*TOKENS.shape, VOCAB)
    assert initial_router_state(model) == {}


def test_logits_may_be_left_out():
    def shapes(params):
        tokens = jnp.asarray(TOKENS)
        output = Transformer(PLAIN).apply({"params": params}, tokens, has_logits=False)
        assert output.logits is None
        return output.hidden

    assert jax.eval_shape(shapes, _params(PLAIN)).shape == (*TOKENS.shape, PLAIN.embed_dim)
