# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws groups of answers with an engine, and scores them.

The answers of a step depend on the parameters, the seed of the run and the number of the step: all
requests of a step are queued before the first is computed, so that the steps of the engine do not
depend on time, and no page outlives the parameters that it was computed with.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmoe.contrib.rl.batches import RolloutSample
from jaxmoe.contrib.rl.config import RolloutsConfig
from jaxmoe.contrib.rl.stream import SampleStore, StreamCounts
from jaxmoe.errors import JaxmoeError
from jaxmoe.execution import ExecutionConfig
from jaxmoe.generation.text import encode_prompts
from jaxmoe.generation.text_stream import TextCodec
from jaxmoe.models.config import ModelConfig
from jaxmoe.serve.answers import Ended, Generated, whole_experts
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine, EngineConfig
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.requests import Sampling
from jaxmoe.serve.streams import AnswerStream

_THREAD = "jaxmoe-rollouts"
_SCORERS = "jaxmoe-scorers"
_QUESTION = "question"
_ANSWERS = "answers"
_REWARDS = "rewards"
"""Columns of a row of the store, which is a prompt with its group."""
_PIECE_TOKENS = 1024
"""Tokens of prompts that a step of the engine computes at most."""


class RolloutError(JaxmoeError, RuntimeError):
    """An answer could not be drawn."""


class Rollouts:
    """Engine over the parameters of a run, and its task.

    Args:
        config: Prompts, groups and sampling.
        model: Config of the model.
        execution: How it is computed.
        codec: Tokens of texts.
        length: Predictions of a row, S.
        seed: Seed of the run.
        ends: Token ids that end an answer.
        stop: Texts that end an answer.
    """

    def __init__(
        self,
        config: RolloutsConfig,
        model: ModelConfig,
        execution: ExecutionConfig,
        codec: TextCodec,
        *,
        length: int,
        seed: int,
        ends: Sequence[int] = (),
        stop: Sequence[str] = (),
    ):
        self._config = config
        self._model = model
        self._execution = execution
        self._codec = codec
        self._length = length
        self._seed = seed
        self._ends = tuple(ends)
        self._stop = tuple(stop)
        self._task = config.reward.build()
        self._executor: ModelExecutor | None = None
        self._engine: Engine | None = None
        self._store = SampleStore((_QUESTION, _ANSWERS, _REWARDS), staleness=config.staleness)
        # Another thread than that of the training, whose mesh is current there.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
        self._scorers = concurrent.futures.ThreadPoolExecutor(
            config.scorers, thread_name_prefix=_SCORERS
        )

    def close(self) -> None:
        """End the engine and the threads."""
        self._store.close()
        if self._engine is not None:  # ends the answers that the thread waits for
            self._engine.close()
        self._thread.shutdown(cancel_futures=True)
        if self._engine is not None:  # the thread may just have made it
            self._engine.close()
        self._scorers.shutdown(cancel_futures=True)

    def advance(self, version: int) -> None:
        """Go on to the parameters before a later step; answers drawn from now on are by these.

        Args:
            version: Steps done before.
        """
        self._store.advance(version)

    def draw(self, step: int, params: Any, router_state: Any) -> None:
        """Start to draw the answers of a step.

        Args:
            step: Steps done before it.
            params: Parameters on one device.
            router_state: State of the routers; None for fresh ones.
        """
        version = self._store.version
        for question in self._task.prompts(step, self._config.prompts, self._seed):
            self._store.submit(version, **{_QUESTION: question})
        work = self._thread.submit(self._draw, step, params, router_state)
        work.add_done_callback(self._end)

    def take(self) -> tuple[list[RolloutSample], int]:
        """Wait for the answers of the next step that was drawn, and return them.

        Returns:
            Answers, those to one prompt next to each other, and how many steps they lag behind.

        Raises:
            ValueError: A prompt is too long.
            RolloutError: A step of the engine has failed.
            RewardError: A function of the user gave no reward.
        """
        rows = self._store.take((_ANSWERS, _REWARDS), self._config.prompts)
        samples = [
            dataclasses.replace(sample, reward=reward)
            for row in rows
            for sample, reward in zip(row.values[_ANSWERS], row.values[_REWARDS], strict=True)
        ]
        return samples, self._store.version - min(row.version for row in rows)

    def counts(self) -> StreamCounts:
        """Return what became of the prompts so far."""
        return self._store.counts()

    def _end(self, work: concurrent.futures.Future[None]) -> None:
        """Pass the error of a thread on to `take`."""
        if not work.cancelled() and (error := work.exception()) is not None:
            self._store.close(error)

    def _score(self) -> None:
        """Score the answers of a row; called once for each."""
        for row in self._store.claim((_QUESTION, _ANSWERS), (_REWARDS,), 1):
            question = row.values[_QUESTION]
            texts = [sample.text for sample in row.values[_ANSWERS]]
            rewards = [float(self._task.score(question, text)) for text in texts]
            self._store.fill(row.id, **{_REWARDS: rewards})

    def _draw(self, step: int, params: Any, router_state: Any) -> None:
        """Draw the answers of a step; each group goes to the store when it is complete."""
        engine = self._serving(params, router_state)
        config = self._config
        rows = self._store.claim((_QUESTION,), (_ANSWERS,), config.prompts)
        texts = [row.values[_QUESTION].prompt for row in rows]
        prompts = encode_prompts(self._codec, texts)
        check_lengths(prompts, config, self._length)
        streams = []
        with engine.held():
            for place, prompt in enumerate(prompts):
                sampling = Sampling(
                    max_tokens=config.max_tokens,
                    seed=_seed(self._seed, step, place, config.group),
                    stop_ids=self._ends,
                    has_experts=config.replay,
                )
                ids = tuple(map(int, prompt))
                # Pages are shared among requests of one salt: those of older parameters are not.
                options: dict[str, Any] = {"stop": self._stop, "salt": str(step)}
                streams.append(engine.submit_samples(ids, sampling, config.group, **options))
        for row, group in zip(rows, streams, strict=True):
            answers = [self._sample(step, stream) for stream in group]
            self._store.fill(row.id, **{_ANSWERS: answers})
            self._scorers.submit(self._score).add_done_callback(self._end)

    def _sample(self, step: int, stream: AnswerStream) -> RolloutSample:
        """Return the answer of a stream, before it is scored."""
        events = list[Any](stream)
        generated: Any = [event for event in events if isinstance(event, Generated)]
        ending: Ended = events[-1]
        if ending.message:
            raise RolloutError(f"step {step + 1}: no answer was drawn: {ending.message}")
        return RolloutSample(
            prompt=tuple(stream.request.prompt),
            answer=tuple(event.token for event in generated),
            log_probs=tuple(float(event.logprob) for event in generated),
            text="".join(event.text for event in events),
            reward=math.nan,
            experts=whole_experts(events) if self._config.replay else None,
        )

    @property
    def _longest_prompt(self) -> int:
        return self._length + 1 - self._config.max_tokens

    def _serving(self, params: Any, router_state: Any) -> Engine:
        """Return the engine with other parameters."""
        if self._engine is not None and self._executor is not None:
            self._executor.load(params, router_state)
            return self._engine
        self._executor = ModelExecutor(
            self._model, params, router_state, config=self._sizes(), execution=self._execution
        )
        waiting = EngineConfig(max_waiting=self._config.num_answers)
        self._engine = Engine(self._executor, waiting, codec=self._codec)
        return self._engine

    def _sizes(self) -> ExecutorConfig:
        config = self._config
        longest = self._length + 1
        together = min(config.num_answers, config.max_sequences)
        width = max(self._longest_prompt, 1)
        pieces = min(max(_PIECE_TOKENS // width, 1), together)
        return ExecutorConfig(
            num_pages=(together + 1) * num_pages(longest, config.page_size),
            page_size=config.page_size,
            shapes=Shapes(singles=together, pieces=((pieces, width),)),
            context_lengths=(longest,),
            has_experts=config.replay,
        )


def check_lengths(
    prompts: Sequence[Sequence[int] | np.ndarray], config: RolloutsConfig, length: int
) -> None:
    """Refuse prompts that leave no room for an answer.

    Args:
        prompts: Token ids of each prompt.
        config: Longest answer.
        length: Predictions of a row, S.

    Raises:
        ValueError: A prompt is too long.
    """
    longest = max(map(len, prompts))
    most = length + 1 - config.max_tokens
    if longest > most:
        raise ValueError(
            f"training.sequence_length={length} must be at least {longest + config.max_tokens - 1}:"
            f" it leaves {most} tokens for a prompt beside rl.max_tokens={config.max_tokens}, and"
            f" one has {longest}"
        )


def _seed(seed: int, step: int, place: int, group: int) -> int:
    """Return the first seed of a group, which takes the next ones too."""
    drawn = np.random.SeedSequence((seed, step, place)).generate_state(1)[0]
    return int(drawn) % (2**31 - group)


def on_one_device(tree: Any, device: jax.Device, *, is_copied: bool) -> Any:
    """Return arrays of a mesh, or of the host, on one of its devices.

    Args:
        tree: Arrays.
        device: Device to hold them.
        is_copied: Whether they outlive the arrays of the mesh, where it has no other device.
    """
    alone = jax.sharding.SingleDeviceSharding(device)
    leaves = jax.tree.leaves(tree)
    is_alone = all(isinstance(x, jax.Array) and len(x.sharding.device_set) == 1 for x in leaves)
    if is_alone:
        return jax.device_put(tree, alone, may_alias=not is_copied)
    return jax.device_put(jax.device_get(tree), alone)
