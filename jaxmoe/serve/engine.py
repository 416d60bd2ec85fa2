# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers requests with one instance of a model: a thread that plans, executes and publishes.

    with Engine(ModelExecutor(model, params, config=...), codec=tokenizer) as engine:
        for event in engine.submit((1, 2, 3), Sampling(max_tokens=8), stop=("\\n",)):
            ...                                       # Generated, ..., Generated, Ended

Any thread may submit and cancel; one thread owns the instance and the devices. Each stream ends
with exactly one `Ended`, also when a step fails: then all streams end with an error, and the
engine goes on with empty pages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, runtime_checkable

from jaxmoe.generation.text import Codec
from jaxmoe.serve.answers import Answer, TextStream
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.metrics import EngineMetrics, Meter
from jaxmoe.serve.policies.batching import BatchingUnion, SplitFuseConfig
from jaxmoe.serve.requests import End, Event, Objective, Request, Result, Sampling, Token
from jaxmoe.serve.step import Step
from jaxmoe.serve.streams import Stream

_THREAD = "jaxmoe-engine"


@runtime_checkable
class Executor(Protocol):
    """What an engine needs of an executor; `jaxmoe.serve.device.executor.ModelExecutor` is one."""

    def facts(self, *, max_waiting: int) -> Facts:
        """Return the sizes of the instance."""
        ...

    def check(self, request: Request) -> None:
        """Raise ValueError if the executor cannot compute a request."""
        ...

    def run(self, step: Step) -> dict[int, Result]:
        """Compute a step and return the drawn tokens by request."""
        ...

    def reset(self) -> None:
        """Begin with empty pages, after a step that failed."""
        ...

    def expert_load(self) -> Any:
        """Return the tokens that each expert of each MoE layer has got [L E]; None without any."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How requests are queued and batched."""

    batching: BatchingUnion = SplitFuseConfig()
    """What a step computes."""
    max_waiting: int = 256
    """Requests in the queue at most; further ones are refused."""
    shares_prefixes: bool = True
    """Whether requests of one tenant share the pages of equal beginnings."""

    def __post_init__(self):
        if self.max_waiting < 1:
            raise ValueError(f"max_waiting={self.max_waiting} must be at least 1")


class Engine:
    """Serves one instance until it is closed."""

    def __init__(
        self, executor: Executor, config: EngineConfig | None = None, *, codec: Codec | None = None
    ):
        """Start the thread.

        Args:
            executor: Computes the steps.
            config: Queue and batching; defaults when None.
            codec: Decoder of tokens, for text and stop strings; None serves tokens alone.

        Raises:
            ValueError: The batching policy needs what the executor lacks.
        """
        config = config or EngineConfig()
        self.config, self._executor, self._codec = config, executor, codec
        self.facts = executor.facts(max_waiting=config.max_waiting)
        config.batching.check(self.facts)
        self._policy = config.batching.build(self.facts)
        self._instance = Instance(
            self.facts, config.batching.name, has_sharing=config.shares_prefixes
        )
        self._streams: dict[int, Stream] = {}
        self._followers: dict[int, list[Stream]] = {}
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_draining = False
        self._failure = ""
        self._meter = Meter()
        self._metrics = self._meter.metrics(self._instance, time.monotonic())
        self._threads = ThreadPoolExecutor(2, thread_name_prefix=_THREAD)
        self._serving = self._threads.submit(self._serve)
        self._serving.add_done_callback(self._end_all)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def metrics(self) -> EngineMetrics:
        """Numbers after the last step."""
        return self._metrics

    @property
    def expert_load(self) -> Any:
        """Tokens that each expert of each MoE layer has got so far [L E]; None without any."""
        return self._executor.expert_load()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the engine is about to end."""
        return self._is_draining

    @property
    def failure(self) -> str:
        """Why the engine has ended by itself; empty while it serves."""
        return self._failure

    def submit(
        self,
        prompt: Iterable[int],
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        objective: Objective | None = None,
        adapter: str = "",
        salt: str = "",
        session: str = "",
        category: str = "",
        priority: int = 0,
        after: Stream | None = None,
        on_event: Callable[[Answer], None] | None = None,
    ) -> Stream:
        """Queue a request and return the stream of its events.

        Args:
            prompt: Token ids; at least one.
            sampling: How the answer is drawn; defaults when None.
            stop: Strings that end the answer, which is cut before them; they need a codec.
            objective: Promised latency.
            adapter: Adapter that answers; empty for the base model.
            salt: Tenant; equal beginnings are shared within one tenant only.
            session: Conversation that the request belongs to.
            category: Kind of request.
            priority: Larger numbers are served first.
            after: Request whose first token this one waits for, to share the pages of its prompt.
            on_event: Called with each event in the engine's thread, and must return at once; the
                stream is not iterated then.

        Raises:
            ValueError: The request asks for what the model or the executor does not have.
        """
        if stop and self._codec is None:
            raise ValueError("stop strings need the text of tokens: give the engine a codec")
        if not all(stop):
            raise ValueError("stop holds an empty string, which every text contains: leave it out")
        request = Request(
            id=next(self._numbers),
            prompt=tuple(map(int, prompt)),
            sampling=sampling or Sampling(),
            objective=objective,
            adapter=adapter,
            salt=salt,
            session=session,
            category=category,
            priority=priority,
        )
        self._executor.check(request)
        stream = Stream(request, TextStream(self._codec, stop), on_event, self.cancel)
        with self._lock:
            refusal = self._failure or (self._is_draining and "the engine is draining") or ""
            if not refusal:
                self._streams[stream.id] = stream
        if refusal:
            stream.end(End(stream.id, "refused", refusal))
        else:
            self._inbox.put(lambda: self._begin(stream, after))
        return stream

    def submit_samples(
        self, prompt: Iterable[int], sampling: Sampling, number: int, **given: Any
    ) -> list[Stream]:
        """Queue several answers to one prompt, with the seeds seed, seed + 1, ...

        The prompt is computed once: the others begin with its full pages when they are there.

        Args:
            prompt: Token ids.
            sampling: How the answers are drawn.
            number: Number of answers.
            **given: Further arguments of `submit`.
        """
        ids = tuple(prompt)
        leader = self.submit(ids, sampling, **given)
        return [leader] + [
            self.submit(
                ids,
                dataclasses.replace(sampling, seed=sampling.seed + index),
                after=leader,
                **given,
            )
            for index in range(1, number)
        ]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Begin nothing new until the end of the block, so that requests are planned together.

        Which requests a step of the engine computes does not depend on the time of their arrival
        then.
        """
        released = threading.Event()
        self._inbox.put(released.wait)
        try:
            yield
        finally:
            released.set()

    def cancel(self, id_: int) -> None:
        """End a request early.

        Args:
            id_: Its number; one that has ended is ignored.
        """
        self._inbox.put(lambda: self._cancel(id_))

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests, and wait until all answers have ended.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Returns:
            Whether all have ended.
        """
        self._stop_accepting()
        self._inbox.put(lambda: None)
        return not wait([self._serving], timeout).not_done

    def cancel_all(self) -> None:
        """End all requests early."""
        self._inbox.put(self._cancel_all)

    def close(self) -> None:
        """Cancel what is left and end the threads."""
        self._stop_accepting()
        self.cancel_all()
        wait([self._serving])
        self._threads.shutdown()

    def _stop_accepting(self) -> None:
        with self._lock:
            self._is_draining = True

    # What follows runs in the engine's thread.

    def _serve(self) -> None:
        """Plan, execute, apply and publish until the engine is drained."""
        wake: float | None = 0.0
        while True:
            self._read_inbox(wake)
            if self._is_draining and not self._streams and self._inbox.empty():
                return
            now = time.monotonic()
            plan = self._policy(self._instance.view(now))
            steps = self._instance.start(plan, now)
            for step in steps:
                self._execute(step)
            self._metrics = self._meter.metrics(self._instance, time.monotonic())
            if steps or plan.admit or plan.evict or plan.restore:
                wake = 0.0
            else:
                # While there is a rate, the numbers are renewed until it has fallen to 0.
                rest = [1.0] if self._metrics.tokens_per_second else []
                rest += [] if plan.wake is None else [max(plan.wake - time.monotonic(), 0.0)]
                wake = min(rest, default=None)

    def _read_inbox(self, timeout: float | None) -> None:
        """Take in what clients have sent; wait for it if there is nothing to compute.

        Args:
            timeout: Seconds to wait at most; None waits until something comes.
        """
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=timeout)() if timeout != 0.0 else self._inbox.get_nowait()()
            while True:
                self._inbox.get_nowait()()

    def _execute(self, step: Step) -> None:
        """Compute a step and publish what it has drawn; an error ends all streams."""
        for work in step.works:
            self._streams[work.id].num_cached = self._instance.queues.sequences[work.id].cached
        future = self._threads.submit(self._executor.run, step)
        error, now = future.exception(), time.monotonic()
        if error is not None:
            message = f"a step failed: {type(error).__name__}: {error}"
            self._executor.reset()
            self._publish(self._instance.fail(message))
            return
        events = self._instance.apply(step, future.result(), now)
        self._meter.step(sum(isinstance(event, Token) for event in events), now)
        self._publish(events)

    def _publish(self, events: Iterable[Event]) -> None:
        for event in events:
            stream = self._streams.get(event.id)
            if stream is None:  # ended by its text, with the token before
                continue
            if isinstance(event, End):
                self._end(stream, event)
                continue
            if stream.token(event):
                self._publish(self._instance.stop(event.id))
            self._release(event.id)

    def _begin(self, stream: Stream, after: Stream | None) -> None:
        if stream.id not in self._streams:  # cancelled
            return
        if after is not None and after.id in self._streams and not after.has_begun:
            self._followers.setdefault(after.id, []).append(stream)
            return
        self._publish(self._instance.submit(stream.request, time.monotonic()))

    def _release(self, id_: int) -> None:
        """Submit the requests that waited for another."""
        for stream in self._followers.pop(id_, ()):
            self._begin(stream, None)

    def _end(self, stream: Stream, end: End) -> None:
        del self._streams[stream.id]
        self._meter.end(stream.end(end))
        self._release(stream.id)

    def _cancel(self, id_: int) -> None:
        stream = self._streams.get(id_)
        if stream is None:
            return
        if id_ in self._instance.queues.sequences:
            self._publish(self._instance.cancel(id_))
        else:  # it waits for another
            self._end(stream, End(id_, "cancelled"))

    def _cancel_all(self) -> None:
        for id_ in [*self._streams]:
            self._cancel(id_)

    def _end_all(self, serving: Future[None]) -> None:
        """End the streams that are left when the thread has failed."""
        error = serving.exception()
        if error is None:
            return
        with self._lock:
            self._failure = f"the engine has failed: {type(error).__name__}: {error}"
            left = [*self._streams.values()]
            self._streams.clear()
        for stream in left:
            stream.end(End(stream.id, "error", self._failure))
