# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory of one device in a train step, by category and phase, in closed form.

    total       = arguments + results that are not arguments + temporaries
    arguments   = state and batch, each array by `device_bytes`: exact
    temporaries = the largest of the phases, each with the gradients (float32, sharded as the
                  parameters) and the parameters in the dtype of products (sharded, made once)

    layers      activations saved of all layers, and the working set of one layer's backward pass
    head        the same activations, the head's matrix and its gradient, the logits of one chunk
    embedding   the table gathered, and its whole gradient
    update      the optimiser's directions, and the matrices that a group brings together whole

The experts are the largest part of a layer's backward pass: with E' experts on a device, A rows and
b bytes per value,

    gathered  3 E' D F b      their gradients  3 E' D F * 4      rows  (4 A D + 4 A F) b
    and if products are narrower than parameters, the gradients in transit in b bytes and, because
    TPUs on a square torus sum them before scattering, their sum: 2 * 3 E' D F b

Attention without a kernel keeps, once for all layers, a mask of N S^2 * 9/16 bytes for each
sequence (the compiler hoists it), and about ten arrays [T N H] at a time. Saved per layer: with
remat "full" the input; with "dots" the dense products as well; with "none" everything that the
backward pass reads, gathered expert weights included.

The terms were read off compiled programs; their factors count arrays of one shape that exist at the
same time, and are not fitted. Compilers may do better (fusion) or worse (padding of narrow shards,
copies between layouts): experiments/README.md has measurements. Fragmentation and the additional
rows of an unbalanced routing are not modelled.

To add a term: a field of `MemoryEstimate` and its phase in `jaxmoe/planning/memory.py`.
"""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp

from jaxmoe.models.stacks import LayerStack
from jaxmoe.parameters import ParameterSpec
from jaxmoe.planning.abstract_step import StepPlan, abstract_batch, abstract_state
from jaxmoe.planning.device_bytes import device_bytes
from jaxmoe.planning.hardware import Platform
from jaxmoe.planning.sizes import Sizes
from sharding import axes as ax

# Arrays of one shape that exist at once in the backward pass of a layer; see the module docstring.
_HEAD_ARRAYS = 10
_STREAM_ARRAYS = 4
_LOGIT_ARRAYS = 3
_MASK_SHARE = 9 / 16
_LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one device."""

    parameters: int
    optimizer: int
    """Optimiser state on the device: only counters if it is kept in the host's memory."""
    batch: int
    other_state: int
    """Router state, counters and key."""
    gradients: float
    """Float32 gradients of the whole step."""
    copies: float
    """Sharded parameters in the dtype of products."""
    saved: float
    """Activations kept for the backward pass."""
    masks: float
    """Masks of attention without a kernel."""
    layer: float
    """Working set of one layer's backward pass without its experts."""
    experts: float
    """Gathered expert weights, their gradients and the experts' rows, for one layer."""
    logits: float
    """Logits of one chunk, the head's matrix and its gradient."""
    embedding: float
    """Gathered embedding table and its gradient."""
    update: float
    """Directions of the optimiser and matrices brought together whole."""

    @property
    def arguments(self) -> int:
        """Arguments of the compiled step; exact."""
        return self.parameters + self.optimizer + self.batch + self.other_state

    @property
    def phases(self) -> dict[str, float]:
        """Temporaries in each phase of the step."""
        held = self.gradients + self.copies
        return {
            "layers": held + self.saved + self.masks + self.layer + self.experts,
            "head": held + self.saved + self.masks + self.logits,
            "embedding": held + self.embedding,
            "update": self.gradients + self.update,
        }

    @property
    def temporaries(self) -> float:
        """Temporaries of the compiled step; approximate."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Phase with the largest temporaries."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def total(self) -> float:
        """Bytes of the whole step; its few results beside the state are not counted."""
        return self.arguments + self.temporaries

    def categories(self) -> dict[str, float]:
        """Return the bytes held in the peak phase by name; they add up to `total`."""
        state = {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "batch and counters": self.batch + self.other_state,
            "gradients": self.gradients,
        }
        held = {"parameters for products": self.copies}
        saved = {"saved activations": self.saved, "attention masks": self.masks}
        match self.peak_phase:
            case "layers":
                return state | held | saved | {"experts": self.experts, "one layer": self.layer}
            case "head":
                return state | held | saved | {"logits and head": self.logits}
            case "embedding":
                return state | held | {"embedding": self.embedding}
            case _:
                return state | {"update": self.update}


def estimate_memory(plan: StepPlan, platform: Platform) -> MemoryEstimate:
    """Return the memory of one device in a train step.

    Args:
        plan: Step to estimate.
        platform: Platform with the array layouts.
    """
    mesh, sizes = plan.mesh, Sizes.of(plan)
    layer, experts = _largest_layer(sizes)
    state = abstract_state(plan, mesh)

    def of(tree: object) -> int:
        return device_bytes(jax.tree.leaves(tree), platform)

    parameters = of(state.params)
    on_device = [
        leaf
        for leaf in jax.tree.leaves(state.opt_state)
        if plan.execution.optimizer_memory == "device" or not leaf.ndim
    ]
    optimizer, elsewhere = of(on_device), of(state.opt_state) - of(on_device)
    copies = 0.0
    if sizes.itemsize < jnp.dtype(plan.execution.precision.parameter_dtype).itemsize:
        copies = float(sum(map(sizes.local, _of_layers(plan))) * sizes.itemsize)
    if plan.execution.state_layout.gathered == "step":
        copies = float(sum(map(sizes.in_use, plan.table)) * sizes.itemsize)
    return MemoryEstimate(
        parameters=parameters,
        optimizer=optimizer,
        batch=of(abstract_batch(plan, mesh)),
        other_state=of(state) - parameters - optimizer - elsewhere,
        gradients=_gradients(sizes, platform) * (2 if plan.accumulation > 1 else 1),
        copies=copies,
        saved=_saved(sizes),
        masks=_masks(sizes, platform),
        layer=layer,
        experts=experts,
        logits=_logits(sizes),
        embedding=_embedding(sizes),
        update=_update(sizes),
    )


def _gradients(sizes: Sizes, platform: Platform) -> float:
    """Return sharded gradients; a TPU pads narrow shards of stacked experts to 128 lanes."""
    total = 0
    for row in sizes.plan.table.trained_rows:
        values, cut = sizes.local(row), row.spec[-1] if len(row.spec) == len(row.shape) else None
        if platform == "tpu" and cut is not None and ax.EXPERTS in row.declaration.axes:
            width = row.shape[-1] // sizes.devices(cut if isinstance(cut, tuple) else (cut,))
            values = values // width * (-(-width // _LANES) * _LANES)
        total += values
    return 4.0 * total


def _saved(sizes: Sizes) -> float:
    plan = sizes.plan
    model, execution = plan.model, plan.execution
    token, inner = sizes.tokens * sizes.itemsize, sizes.inner_tokens * sizes.itemsize
    stream = token * model.embed_dim
    secondary = 0.0
    if execution.state_layout.gathered == "replica":
        copies = sizes.devices(sizes.pieces(ax.REPLICA))
        secondary = sum(map(sizes.local, _of_layers(plan))) * copies * sizes.itemsize
    if execution.remat in ("full", "offload"):  # "offload" keeps them on the host
        return secondary + (model.num_layers * stream if execution.remat == "full" else 0.0)
    fed = collections.Counter(kind.feed_forward.sizes for kind in model.kinds)
    mixed = rows = 0.0
    for heads, layers in collections.Counter(kind.mixer.heads for kind in model.kinds).items():
        projected = inner * sizes.projected(heads)
        if execution.remat == "dots":
            mixed += layers * (2 * stream + projected)
            continue
        attended = 2 * projected + inner * sizes.heads(heads) * heads.head_dim
        attended += 4 * sizes.inner_tokens * sizes.heads(heads)
        mixed += layers * (4 * stream + attended)
    dense = sum(
        3 * inner * one.dense_dim / sizes.shards(ax.ACT_MLP) * layers for one, layers in fed.items()
    )
    if execution.remat == "dots":
        return mixed + dense + secondary
    for one, layers in fed.items():
        width = 2 * model.embed_dim + 2 * one.expert_dim
        rows += layers * (sizes.places(one) * sizes.itemsize * width)
    weights = sum(map(sizes.in_use, _of_experts(plan))) * sizes.itemsize
    return mixed + dense + secondary + rows + weights


def _masks(sizes: Sizes, platform: Platform) -> float:
    plan = sizes.plan
    # None chooses the kernel on a TPU: `pallas_kernels.OPERATIONS["flash_attention"]`.
    without_kernel = ("xla",) if platform == "tpu" else (None, "xla")
    if plan.execution.kernels.attention not in without_kernel:
        return 0.0
    parts = sizes.shards(ax.ACT_SEQ_INNER)  # by queries or by heads
    # One for each kind of mixer in a loop, as long as the loop runs.
    heads = max(
        sum(map(sizes.heads, {stack.kind.mixer.heads for stack in scan.stacks}))
        for scan in plan.model.scans
    )
    return sizes.sequences * heads * plan.sequence_length**2 * _MASK_SHARE / parts


def _largest_layer(sizes: Sizes) -> tuple[float, float]:
    """Return the working set of the layer that needs most, without its experts and of them."""
    pairs = [(_layer(sizes, stack), _experts(sizes, stack)) for stack in sizes.plan.model.stacks]
    return max(pairs, key=sum)


def _layer(sizes: Sizes, stack: LayerStack) -> float:
    heads, inner = stack.kind.mixer.heads, sizes.inner_tokens * sizes.itemsize
    features = _HEAD_ARRAYS * sizes.heads(heads) * heads.head_dim
    return inner * (features + _STREAM_ARRAYS * sizes.plan.model.embed_dim)


def _experts(sizes: Sizes, stack: LayerStack) -> float:
    plan, experts = sizes.plan, stack.kind.feed_forward.sizes
    rows = [row for row in _of_experts(plan) if row.path.startswith(f"{stack.path}/")]
    weights = sum(sizes.in_use(row) / sizes.layers(row) for row in rows)
    width = 4 * plan.model.embed_dim + 4 * experts.expert_dim
    narrow = sizes.itemsize < jnp.dtype(plan.execution.precision.parameter_dtype).itemsize
    travelling = 2 * sizes.itemsize if narrow else 0
    held = sizes.places(experts) * width * sizes.itemsize
    return weights * (sizes.itemsize + 4 + travelling) + held


def _logits(sizes: Sizes) -> float:
    plan = sizes.plan
    model, chunk, tokens = plan.model, plan.execution.loss_chunk, sizes.inner_tokens
    if chunk:
        tokens = min(tokens, sizes.sequences * chunk)
    head = _of_role(plan, "head") or _of_role(plan, "embedding")
    logits = tokens * model.vocab_size / sizes.shards(ax.ACT_VOCAB)
    return _LOGIT_ARRAYS * logits * 4 + sum(map(sizes.in_use, head)) * (sizes.itemsize + 4)


def _embedding(sizes: Sizes) -> float:
    rows = _of_role(sizes.plan, "embedding")
    return sum(map(sizes.in_use, rows)) * (sizes.itemsize + 4.0)


def _update(sizes: Sizes) -> float:
    """Return two arrays like the parameters, and four of the largest matrix that is whole."""
    rows, optimizer = sizes.plan.table.trained_rows, sizes.plan.optimizer_config
    matrices = [row for row in rows if optimizer.traits(row.hyper.group).has_whole_matrices]
    spread = max(map(sizes.local, matrices), default=0)
    return 4.0 * (2 * sum(map(sizes.local, rows)) + 4 * spread)


def _of_role(plan: StepPlan, role: str) -> list[ParameterSpec]:
    return [row for row in plan.table if row.declaration.role == role]


def _of_layers(plan: StepPlan) -> list[ParameterSpec]:
    return [row for row in plan.table if row.declaration.is_stacked]


def _of_experts(plan: StepPlan) -> list[ParameterSpec]:
    return [row for row in plan.table if ax.EXPERTS in row.declaration.axes]
