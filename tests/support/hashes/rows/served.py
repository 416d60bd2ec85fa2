# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of generated and served tokens, and of simulated servers."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

from tests.support.hashes.digests import digest_of_record, digest_of_tree
from tests.support.hashes.rows import Row

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)
ARRIVALS = {0: 0, 1: 0, 2: 2, 3: 5, 4: 5, 5: 6}


def rows() -> Iterator[tuple[str, Row]]:
    """Yield the rows."""
    from jaxmoe.contrib.fleet.dispatch import DISPATCH
    from jaxmoe.contrib.fleet.scaling import SCALING
    from jaxmoe.contrib.serving_lab.batching import EVERY_BATCHING
    from jaxmoe.contrib.serving_lab.caches import ITEM_CACHES
    from jaxmoe.contrib.serving_lab.simulation import WORKLOADS
    from jaxmoe.serve.policies.retention import RETENTION

    for name, config in EVERY_BATCHING.items():
        if not config.needs & {"partitions", "layers"}:
            yield f"served/batching_{name}", functools.partial(_batching, name)
        yield f"simulated/batching_{name}", functools.partial(_simulated, "batching", name)
    areas = {"dispatch": DISPATCH, "scaling": SCALING, "retention": RETENTION}
    for area, members in areas.items():
        for name in members:
            yield f"simulated/{area}_{name}", functools.partial(_simulated, area, name)
    for name in WORKLOADS:
        yield f"simulated/workload_{name}", functools.partial(_workload, name)
    for name in ITEM_CACHES:
        yield f"simulated/cache_{name}", functools.partial(_item_cache, name)
    yield from _special()
    for name in ("latent", "int8", "int4", "carried_logits"):
        yield f"served/{name}", functools.partial(_form, name)
    for sizes in ({"tensor": 2}, {"expert": 2}, {"expert": 2, "tensor": 2}):
        name = "_".join(f"{axis}{size}" for axis, size in sizes.items())
        yield f"served/mesh_{name}", functools.partial(_on_mesh, sizes)


def _special() -> Iterator[tuple[str, Row]]:
    served = {
        "few_pages": {"num_pages": 9},
        "without_sharing": {"has_sharing": False},
        "cancelled": {"cancels": {1: 3, 4: 7}},
        "priorities": {"num_pages": 9, "priorities": {5: 2, 3: 1}},
    }
    for name, options in served.items():
        yield f"served/{name}", functools.partial(_served, options)
    generated = {
        "greedy": {"temperature": 0.0},
        "sampled": {"temperature": 0.9, "top_k": 9, "top_p": 0.9},
        "min_p": {"temperature": 1.2, "min_p": 0.02},
    }
    for name, options in generated.items():
        yield f"generated/{name}", functools.partial(_generated, options)
    for name in ("POINTWISE", "CHOICE", "MIXED"):
        yield f"diffusion/{name.lower()}", functools.partial(_diffused, name)
    yield "diffusion/served", _diffusion_served
    yield "served/logprobs", _logprobs
    yield "served/adapters_together", _adapters
    yield "served/texts_together", _texts
    yield "generated/from_pages", _from_pages


def _requests() -> dict[int, tuple[tuple[int, ...], Any]]:
    """Six requests: greedy and sampled, with shared beginnings."""
    from jaxmoe.serve import Sampling

    return {
        number: (
            PROMPT[: 3 + number],
            Sampling(max_tokens=6, temperature=0.7 * (number % 3), seed=number),
        )
        for number in ARRIVALS
    }


def _tokens(served: Any) -> dict[str, str]:
    return {"tokens": digest_of_record([served.answers, served.reasons])}


def _served(options: dict[str, Any], directory: pathlib.Path) -> dict[str, str]:
    from tests.support.serving import Smaller, serve

    options = dict(options)
    if pages := options.pop("num_pages", None):
        options["sizes"] = Smaller(num_pages=pages)
    return _tokens(serve(_requests(), ARRIVALS, **options))


def _batching(name: str, directory: pathlib.Path) -> dict[str, str]:
    from jaxmoe.contrib.serving_lab.batching import EVERY_BATCHING
    from tests.support.hashes.rows.steps import fitting
    from tests.support.serving import serve

    policy = fitting(EVERY_BATCHING[name], {"budget": 8, "chunk": 8, "border": 6})
    return _tokens(serve(_requests(), ARRIVALS, policy=policy))


def _form(name: str, directory: pathlib.Path) -> dict[str, str]:
    """A model or a format of pages."""
    from jaxmoe import ExecutionConfig, LatentAttentionConfig
    from jaxmoe.precision import PrecisionPolicy
    from jaxmoe.routing import GATES, ROUTERS
    from jaxmoe.serve.device.executor import ModelExecutor
    from tests.support.serving import MODEL, PLAIN, SIZES, params, serve

    model, execution = MODEL, PLAIN
    if name == "latent":
        sizes = {"num_heads": 4, "latent_dim": 8, "nope_dim": 4, "rope_dim": 4, "value_dim": 4}
        model = dataclasses.replace(MODEL, attention=LatentAttentionConfig(**sizes))
    elif name == "carried_logits":
        parts = {"router": ROUTERS["moe_plus_plus"](), "gate": GATES["softmax"]()}
        model = dataclasses.replace(
            MODEL, num_layers=3, moe=dataclasses.replace(MODEL.moe, **parts)
        )
    else:
        execution = ExecutionConfig(precision=PrecisionPolicy(cache=name))
    executor = ModelExecutor(model, params(model), config=SIZES, execution=execution)
    return _tokens(serve(_requests(), ARRIVALS, run=executor.run))


def _on_mesh(sizes: dict[str, int], directory: pathlib.Path) -> dict[str, str]:
    import jax

    from jaxmoe import ExecutionConfig, parameter_table
    from jaxmoe.serve.device.executor import ModelExecutor
    from sharding import MeshConfig
    from tests.support.hashes.rows.steps import mesh_of
    from tests.support.serving import MODEL, SIZES, params, serve

    execution = ExecutionConfig(mesh=MeshConfig(**sizes))
    mesh, table = mesh_of(execution), parameter_table(MODEL, rules=execution.axis_rules)
    places = table.tree(lambda row: jax.sharding.NamedSharding(mesh, row.spec))
    spread = jax.device_put(params(), places)
    executor = ModelExecutor(MODEL, spread, config=SIZES, execution=execution, mesh=mesh)
    return _tokens(serve(_requests(), ARRIVALS, run=executor.run))


def _logprobs(directory: pathlib.Path) -> dict[str, str]:
    """What a step returns beside the tokens."""
    from jaxmoe.serve.engine import Engine
    from tests.support.serving import MODEL, SIZES, ModelExecutor, params

    answers = []
    with Engine(ModelExecutor(MODEL, params(), config=SIZES)) as engine:
        for prompt, sampling in _requests().values():
            asked = dataclasses.replace(sampling, num_logprobs=2)
            events = [event for event in engine.submit(prompt, asked) if hasattr(event, "token")]
            answers.append([[event.token, event.logprob, event.alternatives] for event in events])
    return {"tokens": digest_of_record(answers)}


def _adapters(directory: pathlib.Path) -> dict[str, str]:
    """Two adapters of a model in one batch."""
    from jaxmoe.adapters import LoraConfig, TargetsConfig, TaskLoraConfig, with_base
    from jaxmoe.serve import Sampling
    from jaxmoe.serve.engine import Engine
    from tests.support.serving import MODEL, SIZES, ModelExecutor, params

    loras = {
        "one": LoraConfig(rank=2, alpha=3.0, targets=TargetsConfig(roles=("attention_in",))),
        "two": LoraConfig(rank=3, targets=TargetsConfig(roles=("mlp_out", "shared_in"))),
    }
    values = {
        name: (lora, with_base(params(dataclasses.replace(MODEL, adapter=lora)), params()))
        for name, lora in loras.items()
    }
    adapter, weights = TaskLoraConfig.together(params(), values)
    model, greedy = (
        dataclasses.replace(MODEL, adapter=adapter),
        Sampling(max_tokens=5, temperature=0.0),
    )
    executor = ModelExecutor(model, weights, config=SIZES, adapters=tuple(loras))
    with Engine(executor) as engine:
        streams = [engine.submit(PROMPT, greedy, adapter=name) for name in ("", *loras)]
        answers = [
            [event.token for event in stream if hasattr(event, "token")] for stream in streams
        ]
    return {"tokens": digest_of_record(answers)}


def _texts(directory: pathlib.Path) -> dict[str, str]:
    """Prompts that are continued together, with stop strings and ends."""
    from jaxmoe.generation.text import GenerationConfig, LoadedModel
    from jaxmoe.models.sampling import SamplingConfig
    from jaxmoe.serve.offline import continue_together
    from tests.support.serving import MODEL, params
    from tests.support.texts import Letters

    law = SamplingConfig(temperature=0.9, top_k=8)
    config = GenerationConfig(length=9, sampling=law, seed=3, eos_ids=(5, 11))
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [3, 2]]
    model = LoadedModel(config=MODEL, params=params(), router_state={})
    samples = continue_together(model, Letters(), prompts, config, precision="f32")
    return {"tokens": digest_of_record([[sample.text, sample.token_ids] for sample in samples])}


def _generated(options: dict[str, Any], directory: pathlib.Path) -> dict[str, str]:
    import jax

    from jaxmoe import generate
    from tests.support.serving import MODEL, params

    prompts = [list(PROMPT), list(PROMPT[:3])]
    key = jax.random.key(5)
    tokens = generate(MODEL, params(), prompts, num_tokens=8, key=key, **options)
    return {"tokens": digest_of_tree(tokens)}


def _from_pages(directory: pathlib.Path) -> dict[str, str]:
    """Tokens that attend to some pages of the cache."""
    import jax

    from jaxmoe import ExecutionConfig, generate
    from jaxmoe.execution import WholeRowsConfig
    from sharding.sequence_parallel import PageSelectionConfig
    from tests.support.serving import MODEL, params

    reading = PageSelectionConfig(kept=4, size=2, latest=1)
    model = dataclasses.replace(MODEL, attention=dataclasses.replace(MODEL.attention, window=None))
    execution = WholeRowsConfig.of(ExecutionConfig(), reading)
    options = {"num_tokens": 8, "key": jax.random.key(5), "execution": execution}
    return {"tokens": digest_of_tree(generate(model, params(model), [list(PROMPT)], **options))}


def _diffused(name: str, directory: pathlib.Path) -> dict[str, str]:
    """Rows that a masked-diffusion model fills in."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxmoe.contrib.diffusion.diffuse import diffuse
    from jaxmoe.models.sampling import SamplingConfig
    from tests.support import diffusion
    from tests.support.serving import params

    model = getattr(diffusion, name)
    tokens = jnp.asarray(np.arange(16).reshape(2, 8) % diffusion.VOCAB, jnp.int32)
    is_known = jnp.broadcast_to(jnp.arange(8)[None] < 3, (2, 8))
    keys = jax.random.split(jax.random.key(4), 2)
    options = {"num_steps": 6, "keys": keys, "sampling": SamplingConfig(temperature=0.8)}
    return {"tokens": digest_of_tree(diffuse(model, params(model), tokens, is_known, **options))}


def _diffusion_served(directory: pathlib.Path) -> dict[str, str]:
    from jaxmoe.contrib.diffusion.config import DiffusionConfig
    from jaxmoe.serve import Sampling
    from jaxmoe.serve.engine import Engine
    from tests.support.diffusion import POINTWISE, SIZES, DiffusionExecutor, params

    executor = DiffusionExecutor(POINTWISE, params(POINTWISE), config=SIZES)
    config = DiffusionConfig(steps_per_token=1.0)
    answers = []
    with Engine(executor, config) as engine:
        for seed, length in enumerate((2, 3, 5)):
            sampling = Sampling(max_tokens=3, temperature=0.8, seed=seed)
            events = [event for event in engine.submit(PROMPT[:length], sampling)]
            answers.append([event.token for event in events if hasattr(event, "token")])
    return {"tokens": digest_of_record(answers)}


def _simulated(area: str, name: str, directory: pathlib.Path) -> dict[str, str]:
    """Numbers of a simulated server; of several instances where that is chosen."""
    from jaxmoe.contrib.fleet.dispatch import DISPATCH
    from jaxmoe.contrib.fleet.scaling import SCALING
    from jaxmoe.serve.policies.retention import RETENTION
    from tests.support.hashes.rows.steps import fitting
    from tests.support.simulated import arrivals, simulated

    requests = arrivals(requests=40, rate=200.0)
    if area == "batching":
        return _measured(simulated(name, requests))
    members = {"dispatch": DISPATCH, "retention": RETENTION, "scaling": SCALING}[area]
    member = fitting(members[name], {"prefill": 1, "interval": 0.05, "budget": 0.4})
    options = {area: member} | ({} if area == "retention" else {"num_instances": 3})
    return _measured(simulated("split_fuse", requests, **options))


def _measured(simulation: Any) -> dict[str, str]:
    from jaxmoe.contrib.serving_lab.simulation import measure

    return {"numbers": digest_of_record(dataclasses.asdict(measure(simulation)))}


def _workload(name: str, directory: pathlib.Path) -> dict[str, str]:
    import json

    from jaxmoe.contrib.serving_lab.simulation import WORKLOADS
    from jaxmoe.serve import LatencyObjective

    options: dict[str, Any] = {"requests": 12}
    if name == "file":
        path = directory / "requests.jsonl"
        lines = [
            {
                "timestamp": 100 * number,
                "input_length": 700 + number,
                "output_length": 3 + number,
                "hash_ids": [0, number],
            }
            for number in range(8)
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
        options = {"path": str(path)}
    found = WORKLOADS[name](**options).arrivals(LatencyObjective(), 4096)
    facts = [[one.time, one.request.prompt, one.answer] for one in found]
    return {"requests": digest_of_record(facts)}


def _item_cache(name: str, directory: pathlib.Path) -> dict[str, str]:
    import numpy as np

    from jaxmoe.contrib.serving_lab.caches import ITEM_CACHES, Use, replay

    items = np.random.default_rng(0).zipf(1.5, 200) % 12
    uses = [
        Use(
            item=int(item),
            category=str(item % 2),
            scores={key: ((key * 7 + place) % 5) / 5 for key in range(12)},
            expected=tuple(int(item + step) % 12 for step in (1, 2)),
            time=float(place),
        )
        for place, item in enumerate(items)
    ]
    found = replay(uses, ITEM_CACHES[name](), 5)
    return {"numbers": digest_of_record([found.hits, found.loads, found.bytes_loaded])}
