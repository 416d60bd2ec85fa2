# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One tiny model that is served, its compiled programs, and what its answers must be."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.sampling import SamplingConfig, choose
from jaxmoe.models.transformer import forward
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.serve import Facts, Instance, Request, Sampling, Shapes
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.policies.batching import SplitFuseConfig

VOCAB, LONGEST, ROWS = 24, 32, 8
PLAIN = ExecutionConfig()

# A dense layer, a shared expert, grouped heads, gates, and a window shorter than a sequence.
MODEL = ModelConfig(
    vocab_size=VOCAB,
    num_layers=2,
    embed_dim=16,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, window=9, is_gated=True),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8, num_shared_experts=1),
    dense_layers=(0,),
    dense_dim=16,
)
SIZES = ExecutorConfig(
    num_pages=32,
    page_size=4,
    shapes=Shapes(singles=3, pieces=((2, 5),)),
    context_lengths=(LONGEST,),
    num_logprobs=3,
    has_experts=True,
)


@functools.cache
def params(model: ModelConfig = MODEL) -> Any:
    """Return parameters larger than initial values: with those, one token would win everywhere."""
    rng = np.random.default_rng(0)

    def value(row: Any) -> Any:
        return jnp.asarray(2.0 * rng.standard_normal(row.shape) / row.declaration.fan(0) ** 0.5)

    return jax.tree.map(lambda w: w.astype(jnp.float32), parameter_table(model).tree(value))


@functools.cache
def executor() -> ModelExecutor:
    """Return the executor of the session; its pages are shared by all tests of a process."""
    return ModelExecutor(MODEL, params(), config=SIZES)


@functools.cache
def _whole(model: ModelConfig, execution: ExecutionConfig) -> Callable[..., Any]:
    return jax.jit(lambda params, tokens: forward(model, execution, params, tokens).logits)


def logits_of(
    rows: list[list[int]], model: ModelConfig = MODEL, execution: ExecutionConfig = PLAIN
) -> np.ndarray:
    """Return the logits of some rows, from whole forward passes of one padded shape."""
    found = []
    for first in range(0, len(rows), ROWS):
        tokens = np.zeros((ROWS, LONGEST + 1), np.int32)
        for row, ids in zip(tokens, rows[first : first + ROWS], strict=False):
            row[: len(ids)] = ids
        found.append(np.asarray(_whole(model, execution)(params(model), tokens)))
    return np.concatenate(found)[: len(rows)]


@functools.cache
def _choice(sampling: SamplingConfig) -> Callable[..., Any]:
    pick = functools.partial(choose, is_greedy=sampling.is_greedy, has_filters=sampling.has_filters)
    limits = sampling.limits(VOCAB)
    return jax.jit(
        lambda logits, seed, index: pick(
            logits[None], jax.random.fold_in(jax.random.key(seed), index), limits
        )[0]
    )


def expected(logits: np.ndarray, sampling: Sampling, index: int) -> int:
    """Return the token that a request draws alone.

    Args:
        logits: Logits at the token before.
        sampling: How it is drawn.
        index: Number of the token within the answer.
    """
    config = SamplingConfig(
        temperature=sampling.temperature,
        top_k=sampling.top_k or None,
        top_p=None if sampling.top_p == 1.0 else sampling.top_p,
        min_p=sampling.min_p or None,
    )
    return int(_choice(config)(logits, np.int32(sampling.seed), np.int32(index)))


def check_answers(
    requests: Mapping[int, tuple[tuple[int, ...], Sampling]],
    answers: Mapping[int, list[int]],
    model: ModelConfig = MODEL,
    execution: ExecutionConfig = PLAIN,
) -> None:
    """Assert that each token is the one that the whole forward pass of its request gives."""
    ids = [id_ for id_ in answers if answers[id_]]
    logits = logits_of([[*requests[id_][0], *answers[id_]] for id_ in ids], model, execution)
    for id_, rows in zip(ids, logits, strict=True):
        prompt, sampling = requests[id_]
        for index, token in enumerate(answers[id_]):
            assert token == expected(rows[len(prompt) + index - 1], sampling, index), (id_, index)


@dataclasses.dataclass(frozen=True)
class Smaller:
    """The executor of the session with fewer pages and shapes."""

    num_pages: int = SIZES.num_pages
    shapes: Shapes = SIZES.shapes
    executor: Callable[[], ModelExecutor] = executor

    def facts(self, *, max_waiting: int = 99) -> Facts:
        """Return the sizes of the instance."""
        found = self.executor().facts(max_waiting=max_waiting)
        return dataclasses.replace(
            found,
            num_pages=self.num_pages,
            shapes=self.shapes,
            max_running=self.shapes.singles,
            max_length=min(LONGEST, self.num_pages * SIZES.page_size),
        )

    def check(self, request: Request) -> None:
        """Check a request."""
        self.executor().check(request)

    def run(self, step: Any) -> Any:
        """Compute a step."""
        return self.collect(self.launch(step))

    def launch(self, step: Any) -> Any:
        """Begin a step."""
        return self.executor().launch(step)

    def collect(self, launched: Any) -> Any:
        """Wait for a step."""
        return self.executor().collect(launched)

    def reset(self) -> None:
        """Begin with empty pages."""
        self.executor().reset()

    def expert_load(self) -> Any:
        """Return the tokens of each expert."""
        return self.executor().expert_load()


@dataclasses.dataclass
class Served:
    """What an instance did with some requests."""

    answers: dict[int, list[int]]
    reasons: dict[int, str]
    instance: Instance
    scores: dict[int, Any] = dataclasses.field(default_factory=dict)


def serve(
    requests: Mapping[int, tuple[tuple[int, ...], Sampling]],
    arrivals: Mapping[int, int],
    *,
    cancels: Mapping[int, int] | None = None,
    priorities: Mapping[int, int] | None = None,
    sizes: Smaller | None = None,
    policy: Any = None,
    has_sharing: bool = True,
    run: Any = None,
    steps_ahead: int = 1,
) -> Served:
    """Serve requests that arrive and are cancelled at certain steps, until none is left.

    Args:
        requests: Prompts and sampling by number.
        arrivals: Step before which each arrives.
        cancels: Step before which each is cancelled.
        priorities: Priorities, 0 where none is given.
        sizes: Pages and shapes.
        policy: Batching config.
        has_sharing: Whether prefixes are shared.
        run: Function of a step in place of the executor of the session.
        steps_ahead: Steps that start before the tokens of the last are known.
    """
    sizes, policy = sizes or Smaller(), policy or SplitFuseConfig(budget=8)
    facts = dataclasses.replace(sizes.facts(), steps_ahead=steps_ahead)
    flying = []
    plan, instance = policy.build(facts), Instance(facts, policy.name, has_sharing=has_sharing)
    served = Served({id_: [] for id_ in requests}, {}, instance)

    def note(events: Any) -> None:
        for event in events:
            if hasattr(event, "result"):
                assert event.index == len(served.answers[event.id])
                served.answers[event.id].append(event.result.token)
                if event.result.prompt is not None:
                    assert event.id not in served.scores
                    served.scores[event.id] = event.result.prompt
            else:
                assert event.id not in served.reasons
                served.reasons[event.id] = event.reason

    now = 0
    while now <= max(arrivals.values()) or flying or not instance.is_idle:
        for id_, (prompt, sampling) in requests.items():
            if arrivals[id_] == now:
                priority = (priorities or {}).get(id_, 0)
                request = Request(id=id_, prompt=prompt, sampling=sampling, priority=priority)
                note(instance.submit(request, float(now)))
            if (cancels or {}).get(id_) == now:
                note(instance.cancel(id_))
        _, steps = instance.next_steps(plan, float(now))
        flying += [(step, (run or sizes.launch)(step)) for step in steps]
        if flying and (not steps or len(flying) > steps_ahead):
            step, launched = flying.pop(0)
            note(instance.apply(step, launched if run else sizes.collect(launched), float(now)))
        instance.check_pages()
        now += 1
        assert now < 2000, "the instance makes no progress"
    assert instance.pool.num_free == sizes.num_pages
    assert set(served.reasons) == set(requests)
    return served
