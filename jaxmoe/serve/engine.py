# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers requests with an instance of a model.

    with Engine(ModelExecutor(model, params, config=...), codec=tokenizer) as engine:
        for event in engine.submit((1, 2, 3), Sampling(max_tokens=8), stop=("\\n",)):
            ...                                       # Generated, ..., Generated, Ended

Any thread may submit and cancel. One thread plans, applies and publishes, and the executor has a
thread of its own, which runs its steps in their order. Each stream ends with exactly one `Ended`,
also when a step fails: then all streams end with an error, and the instance goes on with empty
pages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from jaxmoe.generation.text_stream import TextCodec, TextStream
from jaxmoe.serve.answers import AnswerEvent
from jaxmoe.serve.backend import Executor as Executor
from jaxmoe.serve.config import EngineConfig as EngineConfig
from jaxmoe.serve.config import InstancesConfig
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.members import FleetMember, Members
from jaxmoe.serve.metrics import EngineMetrics, total
from jaxmoe.serve.requests import End, Event, LatencyObjective, Refusal, Request, Sampling
from jaxmoe.serve.step import EngineStep
from jaxmoe.serve.streams import AnswerStream

_THREAD = "jaxmoe-engine"


class Engine:
    """Serves an instance until it is closed."""

    def __init__(
        self,
        executor: Executor,
        config: InstancesConfig | None = None,
        *,
        codec: TextCodec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Start the threads.

        Args:
            executor: Computes the steps.
            config: Queue, and what the instance computes; `EngineConfig` when None.
            codec: Decoder of tokens, for text and stop strings; None serves tokens alone.
            clock: Seconds for the policies.

        Raises:
            ValueError: A policy needs what the executor lacks.
        """
        self.config = config or EngineConfig()
        self._codec = codec
        self._streams: dict[int, AnswerStream] = {}
        self._followers: dict[int, list[AnswerStream]] = {}
        self._num_followers = 0
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_draining = False
        self._failure = ""
        self._members = self._start_members(executor, self.config, clock)
        self._members.measure()
        self.facts = self._members.all[0].instance.facts
        """Sizes of the first instance."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
        self._serving = self._thread.submit(self._serve)
        self._serving.add_done_callback(self._end_all)

    def _start_members(
        self, executor: Executor, config: InstancesConfig, clock: Callable[[], float]
    ) -> Members:
        """Return what executes the steps; engines of several instances place requests too."""
        return Members([executor], config, clock=clock, post=self._inbox.put, publish=self._publish)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def metrics(self) -> EngineMetrics:
        """Numbers of all instances after the last step."""
        totals = total(self.instance_metrics)
        offered = self._members.num_offered
        return dataclasses.replace(
            totals,
            num_waiting=totals.num_waiting + offered,
            num_submitted=totals.num_submitted + offered,
        )

    @property
    def instance_metrics(self) -> tuple[EngineMetrics, ...]:
        """Numbers of each instance after the last step."""
        return tuple(member.metrics for member in self._members.all)

    @property
    def expert_load(self) -> Any:
        """Tokens that each expert of each MoE layer has got so far [L E]; None without any."""
        loads = [member.executor.expert_load() for member in self._members.all]
        measured = [load for load in loads if load is not None]
        return sum(measured[1:], measured[0]) if measured else None

    @property
    def most_waiting(self) -> int:
        """Requests that may wait at the same time."""
        return self._members.most_places

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
        on_event: Callable[[AnswerEvent], None] | None = None,
        **options: Any,
    ) -> AnswerStream:
        """Queue a request and return the stream of its events.

        Args:
            prompt: Token ids; at least one.
            sampling: How the answer is drawn; defaults when None.
            on_event: Called with each event in the engine's thread, and must return at once; the
                stream is not iterated then.
            **options: Further arguments of `submit_all`.

        Raises:
            ValueError: The request asks for what the model or the executor does not have.
        """
        call = None if on_event is None else lambda number, event: on_event(event)
        return self.submit_all([prompt], sampling or Sampling(), on_event=call, **options)[0]

    def submit_samples(
        self, prompt: Iterable[int], sampling: Sampling, number: int, **options: Any
    ) -> list[AnswerStream]:
        """Queue several answers to one prompt; see `submit_all`.

        Args:
            prompt: Token ids.
            sampling: How the answers are drawn.
            number: Number of answers.
            **options: Further arguments of `submit_all`.
        """
        return self.submit_all([prompt], sampling, number, **options)

    def submit_all(
        self,
        prompts: Sequence[Iterable[int]],
        sampling: Sampling,
        number: int = 1,
        *,
        stop: Sequence[str] = (),
        objective: LatencyObjective | None = None,
        adapter: str = "",
        salt: str = "",
        session: str = "",
        category: str = "",
        priority: int = 0,
        seed_stride: int = 0,
        on_event: Callable[[int, AnswerEvent], None] | None = None,
    ) -> list[AnswerStream]:
        """Queue several answers to each of some prompts: all of them, or none is begun.

        The answers to a prompt have the seeds seed, seed + 1, ... It is computed once: the others
        begin with its full pages when they are there, and have a place in the queue until then.

        Args:
            prompts: Token ids of each; at least one.
            sampling: How the answers are drawn.
            number: Answers of each prompt.
            stop: Strings that end an answer, which is cut before them; they need a codec.
            objective: Promised latency.
            adapter: Adapter that answers; empty for the base model.
            salt: Tenant; equal beginnings are shared within one tenant only.
            session: Conversation that the requests belong to.
            category: Kind of request.
            priority: Larger numbers are served first.
            seed_stride: Added to the seed with each further prompt; 0 draws equal prompts alike.
            on_event: Called in the engine's thread with the number of each answer, those of a
                prompt side by side, and its event, and must return at once; the streams are not
                iterated then.

        Raises:
            ValueError: A request asks for what the model or the executor does not have.
        """
        if stop and self._codec is None:
            raise ValueError("stop strings need the text of tokens: give the engine a codec")
        if not all(stop):
            raise ValueError("stop holds an empty string, which every text contains: leave it out")
        streams = list[AnswerStream]()
        for place, prompt in enumerate(prompts):
            ids = tuple(map(int, prompt))
            for index in range(number):
                seed = sampling.seed + place * seed_stride + index
                request = Request(
                    id=next(self._numbers),
                    prompt=ids,
                    sampling=dataclasses.replace(sampling, seed=seed),
                    objective=objective,
                    adapter=adapter,
                    salt=salt,
                    session=session,
                    category=category,
                    priority=priority,
                )
                self._members.all[0].executor.check(request)
                call = None if on_event is None else functools.partial(on_event, len(streams))
                streams.append(self._stream_of(request, stop, call))
        self._post(streams, number)
        return streams

    def _stream_of(
        self,
        request: Request,
        stop: Sequence[str],
        on_event: Callable[[AnswerEvent], None] | None,
    ) -> AnswerStream:
        text = TextStream(
            self._codec,
            stop,
            request.prompt,
            min_tokens=request.sampling.min_tokens,
            has_stop=request.sampling.has_stop,
        )
        return AnswerStream(request, text, on_event, self.cancel)

    def _post(self, streams: Sequence[AnswerStream], number: int) -> None:
        """Hand streams over to the engine's thread, or end them if the engine takes none."""
        refusal = None
        with self._lock:
            if self._failure:
                refusal = Refusal("engine_error", self._failure)
            elif self._is_draining:
                refusal = Refusal("draining", "the engine is draining")
            else:
                self._streams.update((stream.id, stream) for stream in streams)
        if refusal is None:
            self._inbox.put(lambda: self._begin_all(streams, number))
            return
        for stream in streams:
            stream.end(End(stream.id, "refused", refusal.message, refusal.code))

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
            Whether all have ended, and the engine has not failed.
        """
        self._stop_accepting()
        self._inbox.put(lambda: None)
        is_over = not wait([self._serving], timeout).not_done
        return is_over and self._serving.exception() is None

    def cancel_all(self) -> None:
        """End all requests early."""
        self._inbox.put(self._cancel_all)

    def close(self) -> None:
        """Cancel what is left and end the threads."""
        self._stop_accepting()
        self.cancel_all()
        wait([self._serving])
        self._thread.shutdown()
        self._members.close()

    def _stop_accepting(self) -> None:
        with self._lock:
            self._is_draining = True

    # What follows runs in the engine's thread.

    def _serve(self) -> None:
        """Plan, execute, apply and publish until the engine is drained."""
        wake: float | None = 0.0
        while True:
            self._read_inbox(wake)
            self._members.measure()
            is_done = not self._streams and not self._members.num_flying
            if self._is_draining and is_done and self._inbox.empty():
                return
            wake = self._members.turn(self._note)

    def _note(self, instance: Instance, step: EngineStep) -> None:
        """Note what the requests of a step have found in the pool."""
        for work in step.works:
            self._streams[work.id].num_cached = instance.queues.sequences[work.id].cached

    def _read_inbox(self, timeout: float | None) -> None:
        """Take in what clients have sent; wait for it if there is nothing to compute.

        Args:
            timeout: Seconds to wait at most; None waits until something comes.
        """
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=timeout)() if timeout != 0.0 else self._inbox.get_nowait()()
            while True:
                self._inbox.get_nowait()()

    def _publish(self, events: Iterable[Event], member: FleetMember | None = None) -> None:
        for event in events:
            stream = self._streams.get(event.id)
            if stream is None:  # ended by its text, with the token before
                continue
            if isinstance(event, End):
                self._end(stream, event, member)
                continue
            if stream.is_stopped:  # tokens of the same step behind a stop string
                continue
            if stream.token(event):
                self._publish(self._members.stop(event.id), member)
            self._release(event.id)

    def _begin_all(self, streams: Sequence[AnswerStream], number: int) -> None:
        """Queue all of some requests, or refuse all: none is computed in vain.

        Args:
            streams: Their streams.
            number: Answers of each prompt, which are side by side.
        """
        num_free = self._members.num_places - self._num_followers
        if len(streams) > num_free and (len(streams) > 1 or self._num_followers):
            message = (
                f"{len(streams)} answers do not fit into the queue, which has {max(num_free, 0)}"
                " free places: ask for fewer, or try again later"
            )
            for stream in streams:
                if stream.id in self._streams:
                    refusal = Refusal("queue_full", message)
                    self._publish(self._members.refuse(stream.request, refusal))
            return
        has_sharing = self._members.all[0].instance.has_sharing
        for index, stream in enumerate(streams):
            leader = streams[index - index % number]
            is_follower = has_sharing and leader is not stream and leader.id in self._streams
            if is_follower and not leader.has_begun:
                self._followers.setdefault(leader.id, []).append(stream)
                self._num_followers += 1
            else:
                self._begin(stream)

    def _begin(self, stream: AnswerStream) -> None:
        if stream.id in self._streams:  # it may have been cancelled
            self._publish(self._members.submit(stream.request))

    def _release(self, id_: int) -> None:
        """Submit the requests that waited for the first token of another."""
        followers = self._followers.pop(id_, ())
        self._num_followers -= len(followers)
        for stream in followers:
            self._begin(stream)

    def _end(self, stream: AnswerStream, end: End, member: FleetMember | None = None) -> None:
        del self._streams[stream.id]
        ending = stream.end(end)
        if member is not None:
            member.meter.end(ending)
        self._release(stream.id)

    def _cancel(self, id_: int) -> None:
        stream = self._streams.get(id_)
        if stream is None:
            return
        if self._members.has(id_):
            self._publish(self._members.cancel(id_))
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
            streams = [*self._streams.values()]
            self._streams.clear()
        for stream in streams:
            stream.end(End(stream.id, "error", self._failure))
