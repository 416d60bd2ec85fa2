# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ling 2.0 and 2.5 in PyTorch, plain and slow: references of families that transformers lacks.

They follow arXiv 2510.22115 and 2401.04658, with the names of fields and tensors of the published
files. Every token meets every expert, and the outputs are weighted; a state is carried token by
token, and no cache is kept. Experts are stacked in memory as those of transformers are, which saves
and loads a tensor of each.
"""

import math

import torch
import transformers
from transformers import conversion_mapping
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class LingConfig(transformers.PretrainedConfig):
    """The fields of Ling 2.0, with the defaults of the published class."""

    model_type = "bailing_moe"

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    hidden_act: str = "silu"
    use_qkv_bias: bool = False
    use_bias: bool = False
    use_qk_norm: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 6e5
    rope_parameters: dict | None = None
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int = 64
    num_experts: int = 256
    num_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 1.0
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    eos_token_id: int | None = None


class LingHybridConfig(LingConfig):
    """The fields of Ling 2.5; its files name the model_type bailing_hybrid."""

    model_type = "bailing_moe_v2_5"

    layer_group_size: int = 5
    group_norm_size: int = 4
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128


class Norm(torch.nn.Module):
    """RMSNorm of the last dimension."""

    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.epsilon).rsqrt()


def rotary(config, length):
    """Return cosines and sines [S W] of the features of a head that turn, in halves."""
    width = int(config.head_dim * config.partial_rotary_factor)
    exponents = torch.arange(0, width, 2).float() / width
    rates, scale = config.rope_theta**-exponents, 1.0
    if config.rope_parameters and config.rope_parameters["rope_type"] != "default":
        rates, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    angles = torch.outer(torch.arange(length).float(), rates).repeat(1, 2)
    return angles.cos() * scale, angles.sin() * scale


def turned(x, cos, sin):
    """Return heads [B S N H] whose first features are turned."""
    width = cos.shape[-1]
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    quarter = torch.cat([-second, first], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([x[..., :width] * cos + quarter * sin, x[..., width:]], dim=-1)


class Attention(torch.nn.Module):
    """Grouped-query attention with one tensor of queries, keys and values."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        heads, shared, width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.query_key_value = torch.nn.Linear(
            config.hidden_size, (heads + 2 * shared) * width, bias=config.use_qkv_bias
        )
        if config.use_qk_norm:
            self.query_layernorm = Norm(width, config.rms_norm_eps)
            self.key_layernorm = Norm(width, config.rms_norm_eps)
        self.dense = torch.nn.Linear(heads * width, config.hidden_size, bias=config.use_bias)

    def forward(self, x):
        config = self.config
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        batch, length, _ = x.shape
        parts = self.query_key_value(x).view(batch, length, heads + 2 * shared, config.head_dim)
        q, k, v = parts.split([heads, shared, shared], dim=2)
        if config.use_qk_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        cos, sin = rotary(config, length)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (part.repeat_interleave(heads // shared, dim=2) for part in (k, v))
        logits = torch.einsum("bsnh,bunh->bnsu", q, k) / math.sqrt(config.head_dim)
        later = torch.ones(length, length).triu(1).bool()
        weights = logits.masked_fill(later, -math.inf).softmax(-1)
        return self.dense(torch.einsum("bnsu,bunh->bsnh", weights, v).reshape(batch, length, -1))


def turned_pairs(x, cos, sin):
    """Return heads of which neighbouring features are turned, in halves."""
    return turned(torch.cat([x[..., ::2], x[..., 1::2]], dim=-1), cos, sin)


class LatentAttention(torch.nn.Module):
    """Latent attention of DeepSeek-V3, whose keys and values are expanded."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        heads, latent = config.num_attention_heads, config.kv_lora_rank
        width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        source = config.hidden_size
        if config.q_lora_rank is not None:
            source = config.q_lora_rank
            self.q_a_proj = torch.nn.Linear(config.hidden_size, source, bias=False)
            self.q_a_layernorm = Norm(source, 1e-6)
            self.q_b_proj = torch.nn.Linear(source, width, bias=False)
        else:
            self.q_proj = torch.nn.Linear(source, width, bias=False)
        self.kv_a_proj_with_mqa = torch.nn.Linear(
            config.hidden_size, latent + config.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = Norm(latent, 1e-6)
        self.kv_b_proj = torch.nn.Linear(
            latent, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.dense = torch.nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=False)

    def forward(self, x):
        config = self.config
        batch, length, _ = x.shape
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        if config.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, length, heads, -1)
        latent, key = self.kv_a_proj_with_mqa(x).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, heads, -1)
        cos, sin = rotary(config, length)
        q = torch.cat([q[..., :nope], turned_pairs(q[..., nope:], cos, sin)], dim=-1)
        key = turned_pairs(key[:, :, None], cos, sin).expand(-1, -1, heads, -1)
        k = torch.cat([kv[..., :nope], key], dim=-1)
        logits = torch.einsum("bsnh,bunh->bnsu", q, k) / math.sqrt(q.shape[-1])
        later = torch.ones(length, length).triu(1).bool()
        weights = logits.masked_fill(later, -math.inf).softmax(-1)
        out = torch.einsum("bnsu,bunh->bsnh", weights, kv[..., nope:])
        return self.dense(out.reshape(batch, length, -1))


def slopes(heads):
    """Return the slopes of ALiBi."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return first if power == heads else first + slopes(2 * power)[::2][: heads - power]


class LinearAttention(torch.nn.Module):
    """Lightning attention with positions, one token after the other."""

    def __init__(self, config, number):
        super().__init__()
        self.config = config
        width = config.num_attention_heads * config.head_dim
        self.query_key_value = torch.nn.Linear(config.hidden_size, 3 * width, bias=False)
        if config.use_qk_norm:
            self.query_layernorm = Norm(config.head_dim, config.rms_norm_eps)
            self.key_layernorm = Norm(config.head_dim, config.rms_norm_eps)
        self.dense = torch.nn.Linear(width, config.hidden_size, bias=False)
        self.g_proj = torch.nn.Linear(config.hidden_size, width, bias=False)
        self.g_norm = Norm(width, config.rms_norm_eps)
        self.share = 1 - (number - 1) / (config.num_hidden_layers - 1) + 1e-5

    def forward(self, x):
        config = self.config
        batch, length, _ = x.shape
        heads = config.num_attention_heads
        q, k, v = self.query_key_value(x).view(batch, length, 3 * heads, -1).split(heads, dim=2)
        if config.use_qk_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        cos, sin = rotary(config, length)
        q, k = turned(q, cos, sin) / math.sqrt(config.head_dim), turned(k, cos, sin)
        # Made here: transformers builds models without values, and fills parameters alone.
        decay = torch.exp(-torch.tensor(slopes(heads)) * self.share)[:, None, None]
        state = torch.zeros(batch, heads, config.head_dim, config.head_dim)
        rows = []
        for place in range(length):
            written = torch.einsum("bnh,bng->bnhg", k[:, place], v[:, place])
            state = state * decay + written
            rows.append(torch.einsum("bnh,bnhg->bng", q[:, place], state))
        y = torch.stack(rows, dim=1).reshape(batch, length, config.group_norm_size, -1)
        y = y * (y.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        y = y.reshape(batch, length, -1) * self.g_norm.weight
        return self.dense(y * torch.sigmoid(self.g_proj(x)))


def attention_of(config, number):
    """Return the mixer of a layer."""
    if config.model_type == LingConfig.model_type:
        return Attention(config)
    period = config.layer_group_size
    is_last = number >= config.num_hidden_layers // period * period
    if (number + 1) % period == 0 or is_last:
        return LatentAttention(config)
    return LinearAttention(config, number)


class FeedForward(torch.nn.Module):
    """SwiGLU."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, hidden, bias=False)
        self.up_proj = torch.nn.Linear(width, hidden, bias=False)
        self.down_proj = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(torch.nn.Module):
    """Sigmoid scores, a bias for the choice, groups ranked by their two best, a scale."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x):
        """Return the factor of each expert [T E], 0 of those that are not chosen."""
        config = self.config
        scores = torch.sigmoid(x @ self.weight.T)
        ranked = scores + self.expert_bias
        groups = ranked.view(len(x), config.n_group, -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group).indices
        is_open = torch.zeros(len(x), config.n_group).scatter(1, best, 1.0).bool()
        ranked = groups.masked_fill(~is_open[..., None], -math.inf).view(len(x), -1)
        chosen = ranked.topk(config.num_experts_per_tok).indices
        values = scores.gather(1, chosen)
        if config.num_experts_per_tok > 1:
            values = values / (values.sum(-1, keepdim=True) + 1e-20)
        values = values * config.routed_scaling_factor
        return torch.zeros_like(scores).scatter(1, chosen, values)


class Experts(torch.nn.Module):
    """The matrices of all experts."""

    def __init__(self, config):
        super().__init__()
        sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = torch.nn.Parameter(torch.empty(sizes[0], 2 * sizes[2], sizes[1]))
        self.down_proj = torch.nn.Parameter(torch.empty(*sizes))

    def forward(self, x):
        """Return the output of each expert [T E D]."""
        gate, up = torch.einsum("td,efd->tef", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("tef,edf->ted", torch.nn.functional.silu(gate) * up, self.down_proj)


class MixtureOfExperts(torch.nn.Module):
    """Routed experts beside shared ones."""

    def __init__(self, config):
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config)
        hidden = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = FeedForward(config.hidden_size, hidden)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        routed = torch.einsum("te,ted->td", self.gate(rows), self.experts(rows))
        return routed.view_as(x) + self.shared_experts(x)


class Layer(torch.nn.Module):
    """One layer."""

    def __init__(self, config, number):
        super().__init__()
        width = config.hidden_size
        self.attention = attention_of(config, number)
        is_dense = number < config.first_k_dense_replace
        self.mlp = (
            FeedForward(width, config.intermediate_size) if is_dense else MixtureOfExperts(config)
        )
        self.input_layernorm = Norm(width, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(width, config.rms_norm_eps)

    def forward(self, x):
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LingModel(torch.nn.Module):
    """All layers."""

    def __init__(self, config):
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(
            Layer(config, number) for number in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens):
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class LingForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A model with its head."""

    config_class = LingConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = LingModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.word_embeddings

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **unused):
        """Return all tokens so far: this model has no cache."""
        return {"input_ids": input_ids}

    def forward(self, input_ids, labels=None, **unused):
        logits = self.lm_head(self.model(input_ids))
        loss = None
        if labels is not None:
            rows = logits[:, :-1].reshape(-1, logits.shape[-1])
            loss = torch.nn.functional.cross_entropy(rows, labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss, logits=logits)


class LingHybridForCausalLM(LingForCausalLM):
    """Ling 2.5 with its head."""

    config_class = LingHybridConfig


CLASSES = {
    "bailing_moe": (LingConfig, LingForCausalLM),
    "bailing_moe_v2_5": (LingHybridConfig, LingHybridForCausalLM),
}


def register():
    """Make the classes known to transformers."""
    mapping = conversion_mapping.get_checkpoint_conversion_mapping("qwen2_moe")
    for name, (config, model) in CLASSES.items():
        transformers.AutoConfig.register(name, config, exist_ok=True)
        transformers.AutoModelForCausalLM.register(config, model, exist_ok=True)
        conversion_mapping.register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
