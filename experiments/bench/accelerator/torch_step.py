# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The peer of `step` in plain PyTorch: SDPA, _grouped_mm, fused AdamW, torch.compile.

The same width, layers, tokens, precision, loss and clipping; weights are drawn by PyTorch. No other
library is between PyTorch and the card, so this is the strongest peer.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from experiments.bench.accelerator.work import FAILURES, BenchWork, emit, emit_failure, run_part
from jaxmoe.optional import MissingPackageError, require

STEPS = 14
WARM_UP = 4
BATCHES = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlainSizes:
    """Sizes of the model and of a batch."""

    batch: int = 4
    length: int = 4096
    layers: int = 4
    vocab: int = 50304
    width: int = 2048
    heads: int = 16
    experts: int = 64
    chosen: int = 8
    hidden: int = 1024


TINY = PlainSizes(
    batch=2, length=64, layers=2, vocab=512, width=64, heads=4, experts=8, chosen=2, hidden=32
)


class PlainModel:
    """OLMoE's layers as functions of a dictionary of tensors.

    Args:
        torch: The package.
        sizes: Sizes.
        device: "cuda" or "cpu".
        is_recomputed: Whether each layer is recomputed in the backward pass.
    """

    def __init__(self, torch: Any, sizes: PlainSizes, device: str, *, is_recomputed: bool):
        self.torch = torch
        self.sizes = sizes
        self.is_recomputed = is_recomputed
        d = sizes.width
        e = sizes.experts
        h = sizes.hidden

        def draw(*shape: int, scale: float) -> Any:
            return (torch.randn(*shape, device=device) * scale).requires_grad_()

        def ones() -> Any:
            return torch.ones(d, device=device, requires_grad=True)

        self.embed = draw(sizes.vocab, d, scale=0.02)
        self.head = draw(d, sizes.vocab, scale=d**-0.5)
        self.last_norm = ones()
        self.layers = [
            {
                "norms": [ones() for _ in range(4)],
                "qkv": draw(d, 3 * d, scale=d**-0.5),
                "out": draw(d, d, scale=d**-0.5),
                "router": draw(d, e, scale=d**-0.5),
                "up": draw(e, d, 2 * h, scale=d**-0.5),
                "down": draw(e, h, d, scale=h**-0.5),
            }
            for _ in range(sizes.layers)
        ]
        width = d // sizes.heads
        inverse = 10000 ** (-torch.arange(0, width, 2, device=device) / width)
        angles = torch.arange(sizes.length, device=device)[:, None] * inverse
        self.cos, self.sin = (f(angles).to(torch.bfloat16) for f in (torch.cos, torch.sin))

    def parameters(self) -> list[Any]:
        """Return all tensors that are trained."""
        tensors = [self.embed, self.head, self.last_norm]
        for layer in self.layers:
            tensors += layer["norms"] + [x for name, x in layer.items() if name != "norms"]
        return tensors

    def loss(self, tokens: Any, targets: Any) -> tuple[Any, Any]:
        """Return the cross-entropy and the balance loss.

        Args:
            tokens: Ids [B S].
            targets: Ids [B S].
        """
        torch = self.torch
        checkpoint = self.torch.utils.checkpoint.checkpoint
        x = torch.nn.functional.embedding(tokens, self.embed).to(torch.bfloat16)
        balance = 0.0
        for layer in self.layers:
            if self.is_recomputed:
                x, layer_loss = checkpoint(self._layer, layer, x, use_reentrant=False)
            else:
                x, layer_loss = self._layer(layer, x)
            balance = balance + layer_loss
        logits = (self._norm(x, self.last_norm) @ self.head.to(torch.bfloat16)).float()
        flat = logits.view(-1, self.sizes.vocab), targets.reshape(-1)
        return torch.nn.functional.cross_entropy(*flat), balance

    def _norm(self, x: Any, w: Any) -> Any:
        torch = self.torch
        y = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=1e-5)
        return y.to(x.dtype) * w.to(x.dtype)

    def _rotate(self, x: Any) -> Any:
        a, b = x.chunk(2, -1)
        cos = self.cos
        sin = self.sin
        return self.torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _layer(self, layer: dict[str, Any], x: Any) -> tuple[Any, Any]:
        torch = self.torch
        sizes = self.sizes
        half = self.torch.bfloat16
        before, after, of_q, of_k = layer["norms"]
        shape = sizes.batch, sizes.length, sizes.heads, sizes.width // sizes.heads
        q, k, v = (self._norm(x, before) @ layer["qkv"].to(half)).chunk(3, -1)
        q = self._norm(q, of_q)
        k = self._norm(k, of_k)
        q, k, v = (y.view(*shape).transpose(1, 2) for y in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            self._rotate(q), self._rotate(k), v, is_causal=True
        )
        x = x + attended.transpose(1, 2).reshape(*x.shape) @ layer["out"].to(half)
        y = self._norm(x, after).view(-1, sizes.width)
        probabilities = torch.softmax(y.float() @ layer["router"], -1)
        gates, ids = probabilities.topk(sizes.chosen, -1)
        flat = ids.reshape(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=sizes.experts)
        ends = counts.cumsum(0).to(torch.int32)
        inner = torch._grouped_mm(y[order // sizes.chosen], layer["up"].to(half), offs=ends)
        gate, up = inner.chunk(2, -1)
        activated = torch.nn.functional.silu(gate) * up
        rows = torch._grouped_mm(activated, layer["down"].to(half), offs=ends)
        rows = rows * gates.reshape(-1)[order, None].to(half)
        mixed = torch.zeros_like(y).index_add_(0, order // sizes.chosen, rows)
        share = counts.float() / flat.numel() * probabilities.mean(0)
        return x + mixed.view(*x.shape), sizes.experts * share.sum()


def torch_step(work: BenchWork) -> None:
    """Emit the row of the step: options `remat` and `is_compiled`."""
    remat = work.options.get("remat", "none")
    is_compiled = bool(work.options.get("is_compiled", True))
    sizes = TINY if work.is_tiny else PlainSizes()
    row: dict[str, Any] = {
        "case": f"step, {sizes.layers} layers, remat {remat}",
        "name": "plain PyTorch" + (", compiled" if is_compiled else ""),
    }
    try:
        torch = require("torch", "hf")
        row["torch"] = torch.__version__
        row |= _measure(torch, sizes, is_compiled=is_compiled, is_recomputed=remat == "full")
    except (MissingPackageError, *FAILURES) as error:
        emit_failure(error, **row)
    else:
        emit(**row)


def _measure(
    torch: Any, sizes: PlainSizes, *, is_compiled: bool, is_recomputed: bool
) -> dict[str, Any]:
    device = device_of(torch)
    torch.manual_seed(0)
    model = PlainModel(torch, sizes, device, is_recomputed=is_recomputed)
    params = model.parameters()
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    optimizer = torch.optim.AdamW(params, **settings)
    run = torch.compile(model.loss) if is_compiled else model.loss
    rows = np.random.default_rng(0).integers(
        0, sizes.vocab, (BATCHES, sizes.batch, sizes.length + 1)
    )
    data = torch.from_numpy(rows).to(device)
    seconds = []
    losses = []
    for number in range(STEPS):
        wait_for(torch)
        started = time.perf_counter()
        batch = data[number % BATCHES]
        loss, balance = run(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        (loss + 0.01 * balance / sizes.layers).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait_for(torch)
        seconds.append(time.perf_counter() - started)
        losses.append(round(float(loss.detach()), 4))
    median = float(np.median(seconds[WARM_UP:]))
    return {
        "first_seconds": round(seconds[0], 1),
        "ms": round(1e3 * median, 1),
        "tokens_per_second": round(sizes.batch * sizes.length / median),
        "losses": losses,
        "parameters": sum(x.numel() for x in params),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def device_of(torch: Any) -> str:
    """Return the device that PyTorch computes on.

    Args:
        torch: The package.
    """
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait_for(torch: Any) -> None:
    """Wait until a GPU has computed what it was given; the CPU has when a call returns.

    Args:
        torch: The package.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    run_part(torch_step)
