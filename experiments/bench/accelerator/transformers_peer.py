# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""transformers beside ours: a training step under autocast, or answers; options `work`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from experiments.bench.accelerator.torch_step import (
    BATCHES,
    STEPS,
    WARM_UP,
    device_of,
    wait_for,
)
from experiments.bench.accelerator.work import FAILURES, BenchWork, emit, emit_failure, run_part
from jaxmoe.optional import MissingPackageError, require

OLMOE: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "max_position_embeddings": 4096,
}
TINY = OLMOE | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def transformers_peer(work: BenchWork) -> None:
    """Emit the rows of the step, or of the answers."""
    try:
        torch = require("torch", "hf")
        transformers = require("transformers", "hf")
    except MissingPackageError as error:
        emit_failure(error, case="transformers", name="transformers")
        return
    if work.options.get("work", "step") == "step":
        _step(work, torch, transformers)
    else:
        _answers(work, torch, transformers)


def _model(
    work: BenchWork, torch: Any, transformers: Any, layers: int, dtype: Any, **more: Any
) -> Any:
    sizes = (TINY if work.is_tiny else OLMOE) | {"num_hidden_layers": layers} | more
    torch.manual_seed(0)
    with torch.device(device_of(torch)):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.OlmoeConfig(**sizes),
            dtype=dtype,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )


def _step(work: BenchWork, torch: Any, transformers: Any) -> None:
    batch, length, layers = (2, 64, 2) if work.is_tiny else (4, 4096, 4)
    name = f"transformers {transformers.__version__}, autocast"
    row: dict[str, Any] = {"case": f"step, {layers} layers, remat none", "name": name}
    try:
        more = {"output_router_logits": True, "use_cache": False}
        model = _model(work, torch, transformers, layers, torch.float32, **more).train()
        settings = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        device = device_of(torch)
        vocab = model.config.vocab_size
        rows = np.random.default_rng(0).integers(0, vocab, (BATCHES, batch, length + 1))
        data = torch.from_numpy(rows).to(device)
        seconds = []
        losses = []
        for number in range(STEPS):
            wait_for(torch)
            started = time.perf_counter()
            rows_now = data[number % BATCHES]
            tokens = rows_now[:, :-1].contiguous()
            targets = rows_now[:, 1:].contiguous()
            with torch.autocast(device, torch.bfloat16):
                output = model(input_ids=tokens, labels=targets, shift_labels=targets)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            wait_for(torch)
            seconds.append(time.perf_counter() - started)
            losses.append(round(float(output.loss.detach()), 4))
        median = float(np.median(seconds[WARM_UP:]))
        row |= {
            "ms": round(1e3 * median, 1),
            "tokens_per_second": round(batch * length / median),
            "losses": losses,
        }
    except FAILURES as error:
        emit_failure(error, **row)
    else:
        emit(**row)


def _answers(work: BenchWork, torch: Any, transformers: Any) -> None:
    prompt, answer = (16, 16) if work.is_tiny else (128, 128)
    layers = 2 if work.is_tiny else 16
    model = _model(work, torch, transformers, layers, torch.bfloat16).eval()
    for batch in (2,) if work.is_tiny else work.options.get("batches", (1, 8, 64)):
        name = f"transformers {transformers.__version__}, generate"
        row: dict[str, Any] = {"case": f"serving, {batch} requests", "name": name}
        rows = np.random.default_rng(0).integers(1, model.config.vocab_size, (batch, prompt))
        tokens = torch.from_numpy(rows).to(device_of(torch))

        def seconds_of(count: int, tokens: Any = tokens) -> float:
            wait_for(torch)
            started = time.perf_counter()
            with torch.no_grad():
                model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=-1,
                )
            wait_for(torch)
            return time.perf_counter() - started

        try:
            seconds_of(4)
            prefill = min(seconds_of(1), seconds_of(1))
            seconds = seconds_of(answer)
            row |= {
                "prefill_tokens_per_second": round(batch * prompt / prefill),
                "tokens_per_second": round(batch * answer / seconds),
                "ms": round(1e3 * (seconds - prefill) / (answer - 1), 2),
            }
        except FAILURES as error:
            emit_failure(error, **row)
        else:
            emit(**row)


if __name__ == "__main__":
    run_part(transformers_peer)
