# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""State machine of one instance of a model: requests, pages, steps. Runs nothing itself.

    view = instance.view(now)
    steps = instance.start(policy(view), now)       # the rules are checked, pages are taken
    for step in steps:
        results = executor.run(step)                # {request: Result} of the works that draw
        events = instance.apply(step, results, now)

Where `Facts.steps_ahead` allows it, the next step starts before `apply`: a sequence is counted as
computed when its step starts, and the token that the step draws stands as `PENDING` until then. Of
an answer that ends with it one token too many is computed, and thrown away.

An engine executes the steps on JAX, a simulator computes how long they take. All methods belong to
one thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxmoe.serve.blocks import BlockPool, HostCopies
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import EvictionKind, Plan
from jaxmoe.serve.queues import Queues, refusal_of
from jaxmoe.serve.requests import End, EndReason, Event, Refusal, Request, Result, Token
from jaxmoe.serve.rules import check
from jaxmoe.serve.sequence import Sequence, SequencePages
from jaxmoe.serve.step import EngineStep, Swap, Work
from jaxmoe.serve.view import InstanceView, may_start

_NOTHING = Plan()


class Instance:
    """Requests of one instance from submission to their end."""

    def __init__(self, facts: Facts, policy: str = "policy", *, has_sharing: bool = True):
        if facts.max_length > facts.num_pages * facts.page_size:
            raise ValueError(
                f"max_length={facts.max_length} tokens do not fit into {facts.num_pages} pages of"
                f" {facts.page_size} tokens: lower max_length or raise num_pages"
            )
        self.facts = facts
        self.policy = policy
        """Name of the policy, for messages."""
        self.pool = BlockPool(facts.num_pages, facts.page_size, facts.group)
        self.queues = Queues()
        self.num_preempted = 0
        self.num_computed = 0
        """Tokens computed in all layers."""
        self.num_cached = 0
        """Tokens taken from the pool at admissions instead."""
        self.num_guessed = self.num_accepted = 0
        """Tokens that were guessed and computed, and those of them that were drawn as well."""
        self.has_sharing = has_sharing
        """Whether requests share the pages of equal beginnings."""
        self.tables = SequencePages(self.pool, has_sharing=has_sharing)
        self.flying: list[EngineStep] = []
        """Steps that have started and not ended."""
        self.copies: list[tuple[int, int]] = []
        """Pages to copy with the next step."""
        self.dropped: list[int] = []
        """Swapped sequences that ended since the last step."""
        self.host = self._no_copies()
        self.incoming: dict[int, list[int]] = {}
        """Pages that are taken for sequences on their way here, by request."""

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is left."""
        return not self.queues.sequences

    def refusal(self, request: Request) -> Refusal | None:
        """Return why a request cannot be served, None if it can."""
        return refusal_of(request, self.facts, self.queues)

    def submit(self, request: Request, now: float) -> tuple[Event, ...]:
        """Queue a request.

        Args:
            request: Request.
            now: Seconds on the instance's clock.

        Returns:
            Nothing, or the end of the stream if the request is refused.
        """
        refusal = self.refusal(request)
        if refusal is not None:
            return self.refuse(request, refusal)
        order = self.queues.submitted
        size = self.facts.page_size
        tokens = request.prompt
        self.queues.add(
            Sequence(request=request, order=order, arrived=now, page_size=size, tokens=tokens)
        )
        return ()

    def refuse(self, request: Request, refusal: Refusal) -> tuple[Event, ...]:
        """Count a request that is not queued, and return the end of its stream.

        Args:
            request: Request.
            refusal: Why.
        """
        self.queues.submitted += 1
        self.queues.ended["refused"] += 1
        return (End(request.id, "refused", refusal.message, refusal.code),)

    def cancel(self, id_: int) -> tuple[Event, ...]:
        """End a request early; its pages are given back, at once or when its step ends.

        Args:
            id_: Request; one that has ended already is ignored.
        """
        sequence = self.queues.sequences.get(id_)
        if sequence is None or sequence.is_cancelled:
            return ()
        if self._is_waited_for(sequence):
            sequence.is_cancelled = True
            return ()
        return (self.end(sequence, "cancelled"),)

    def stop(self, id_: int) -> tuple[Event, ...]:
        """End a request whose answer is whole, such as after a stop string; as `cancel` else.

        Args:
            id_: Request; one that has ended already is ignored.
        """
        sequence = self.queues.sequences.get(id_)
        if sequence is None or self._is_waited_for(sequence):
            return ()
        return (self.end(sequence, "stop"),)

    def view(self, now: float) -> InstanceView:
        """Return what a policy may see.

        Args:
            now: Seconds on the instance's clock.
        """
        return InstanceView(**self._visible(now))

    def _visible(self, now: float) -> dict[str, Any]:
        """Return the fields of a view."""
        running = tuple(self.queues.running.values())
        busy = tuple([sequence for sequence in running if sequence.is_busy or sequence.is_leaving])
        if busy:
            running = tuple([sequence for sequence in running if sequence.is_free])
        swapped = self.queues.swapped.values()
        return {
            "now": now,
            "facts": self.facts,
            "pool": self.pool,
            "running": running,
            "busy": busy,
            "waiting": self.queues.waiting,
            "swapped": tuple(sorted(swapped, key=lambda sequence: sequence.rank)),
            "flying": tuple(self.flying),
            "finished": tuple(self.queues.finished),
            "has_sharing": self.has_sharing,
            "num_moving": len(self.queues.moving) + len(self.incoming),
        }

    @property
    def may_start(self) -> bool:
        """Whether another step may start."""
        return may_start(self.flying, self.facts)

    def next_steps(
        self, policy: Callable[[InstanceView], Plan], now: float
    ) -> tuple[Plan, tuple[EngineStep, ...]]:
        """Start what a policy wants, if there is a request and room for a step.

        Args:
            policy: Returns a plan for the state as it is.
            now: Seconds on the instance's clock.

        Returns:
            The plan, and steps to be executed and then given to `apply`.
        """
        if self.is_idle or not self.may_start:
            return _NOTHING, ()
        view = self.view(now)
        plan = policy(view)
        return plan, self.start(plan, now, view)

    def start(
        self, plan: Plan, now: float, view: InstanceView | None = None
    ) -> tuple[EngineStep, ...]:
        """Check a plan, move sequences and take pages.

        Args:
            plan: Plan of the policy for the state as it is.
            now: Seconds on the instance's clock.
            view: What the policy saw, if it is at hand.

        Returns:
            A step to be executed and then given to `apply`; none where there is nothing to do.

        Raises:
            PlanError: The plan breaks a rule; nothing was changed.
        """
        view = view or self.view(now)
        check(plan, view, self.policy)
        out = tuple(s for e in plan.evict if (s := self._evict(e.id, e.kind)) is not None)
        waiting = view.find_waiting(plan.admit)
        for id_ in plan.admit:
            self._admit(waiting[id_], view.hits(waiting[id_]), now)
        back = tuple(self._restore(id_) for id_ in plan.restore)
        if not (plan.singles or plan.pieces or out or back):
            return ()
        step = EngineStep(
            singles=tuple([self._work(id_, 1) for id_ in plan.singles]),
            pieces=tuple(self._work(piece.id, piece.count) for piece in plan.pieces),
            out=out,
            back=back,
            copies=tuple(self.copies),
            dropped=tuple(self.dropped),
            is_foreseen=self.facts.steps_ahead > 0,
        )
        if step.is_foreseen:
            self._foresee(step)
        self.copies = []
        self.dropped = []
        self.flying.append(step)
        return (step,)

    def apply(self, step: EngineStep, results: Mapping[int, Any], now: float) -> tuple[Event, ...]:
        """Take over what a step computed.

        Args:
            step: Step of `start`.
            results: Result of every work of the step that draws, by request.
            now: Seconds on the instance's clock.

        Returns:
            New tokens and ended streams.
        """
        self.flying = [flying for flying in self.flying if flying is not step]
        events: list[Event] = []
        sequences = self.queues.sequences
        steps_ahead = self.facts.steps_ahead
        for work in (*step.singles, *step.pieces):
            if steps_ahead and work.id not in sequences:
                continue  # its answer has ended with the token before
            sequence = sequences[work.id]
            sequence.last_step = now
            is_written = work.draws and not sequence.is_cancelled
            if sequence.reads_more and work.reads_prompt:
                sequence.note_prompt(work.start, results[work.id])
            result = results[work.id] if is_written else None
            if step.is_foreseen:
                events += self._confirm(sequence, work, result, now)
                continue
            sequence.is_busy = False
            events += self._take_over(sequence, work, result, now)
            if sequence.is_cancelled and sequence.state != "finished":
                events.append(self.end(sequence, "cancelled"))
        self.check()
        return tuple(events)

    def fail(self, message: str) -> tuple[Event, ...]:
        """End all requests after a step that failed, and forget what the pages hold.

        Args:
            message: Reason for the clients.
        """
        self.flying.clear()
        ends = []
        for sequence in list(self.queues.sequences.values()):
            sequence.is_busy = False
            ends.append(self.end(sequence, "error", message))
        self.pool.forget()
        self.host = self._no_copies()
        self.copies = []
        self.dropped = []
        self.check()
        return tuple(ends)

    @property
    def num_running(self) -> int:
        """Sequences with pages."""
        return len(self.queues.running)

    def check(self) -> None:
        """Assert the conservation law.

        Raises:
            AssertionError: A sequence was lost.
        """
        self.queues.check()

    def check_pages(self) -> None:
        """Assert the invariants of the pool; costs time in proportion to its size.

        Raises:
            AssertionError: An invariant does not hold.
        """
        tables = [sequence.pages for sequence in self.queues.sequences.values()]
        self.pool.check([*tables, *self.incoming.values()])

    def end(self, sequence: Sequence, reason: EndReason, message: str = "") -> End:
        """End a sequence that no step computes.

        Args:
            sequence: Sequence in any state.
            reason: Why.
            message: Explanation for the client.
        """
        if sequence.state == "swapped":
            self.dropped.append(sequence.id)
        self.queues.leave(sequence)
        self.tables.give_back(sequence)
        sequence.forget_pending()
        sequence.state = "finished"
        del self.queues.sequences[sequence.id]
        self.queues.ended[reason] += 1
        if reason in ("stop", "length"):
            self.queues.finished.append(sequence)
        return End(sequence.id, reason, message)

    def _evict(self, id_: int, kind: EvictionKind) -> Swap | None:
        sequence = self.queues.running[id_]
        self.queues.leave(sequence)
        self.num_preempted += 1
        sequence.preempted += 1
        pages = tuple(sequence.pages)
        self.tables.give_back(sequence)
        sequence.named = 0
        if kind == "recompute":
            sequence.computed = 0
        sequence.state = "waiting" if kind == "recompute" else "swapped"
        self.queues.enter(sequence)
        if kind == "recompute":
            return None
        swap = Swap(id=id_, pages=pages, num_tokens=sequence.computed)
        if not self.host.size:
            return swap
        names = tuple(sequence.names()[: sequence.computed // self.facts.page_size])
        num_kept, dropped = self.host.keep(names)
        return dataclasses.replace(swap, kept=num_kept, names=names, dropped=dropped)

    def _no_copies(self) -> HostCopies:
        """Return empty host memory; copies have names, by which only equal pages are shared."""
        return HostCopies(self.facts.host_pages if self.has_sharing else 0)

    def _admit(self, sequence: Sequence, hits: tuple[int, ...], now: float) -> None:
        self.queues.leave(sequence)
        self.tables.begin(sequence, hits)
        sequence.computed = len(hits) * self.facts.page_size
        self.num_cached += sequence.computed
        if sequence.admitted is None:
            sequence.admitted = now
            sequence.cached = sequence.computed
        sequence.state = "running"
        self.queues.enter(sequence)

    def _restore(self, id_: int) -> Swap:
        sequence = self.queues.swapped[id_]
        self.queues.leave(sequence)
        self.tables.grow(sequence, sequence.computed)
        sequence.state = "running"
        self.queues.enter(sequence)
        return Swap(id=id_, pages=tuple(sequence.pages), num_tokens=sequence.computed)

    def _work(self, id_: int, count: int) -> Work:
        sequence = self.queues.running[id_]
        start = sequence.computed
        end = start + count
        self.tables.cover(sequence, start, end)
        sequence.is_busy = True
        request = sequence.request
        tokens = sequence.tokens
        ids = (tokens[start],) if count == 1 else tuple(tokens[start:end])
        draws = end == len(tokens)
        index = sequence.num_written
        sampling = request.sampling
        has_history = self.facts.tells_history or (
            sequence.reads_more and (sequence.reads_prompt or (draws and sampling.has_history))
        )
        history = tuple(tokens) if has_history else ()
        pages = tuple(sequence.pages)
        return Work(id_, ids, start, pages, draws, index, sampling, request.adapter, history)

    def _is_waited_for(self, sequence: Sequence) -> bool:
        """Return whether a sequence ends only when its step has ended.

        Where steps are foreseen none does: devices compute them in their order, so that its pages
        may be given back at once.
        """
        return sequence.is_busy and not self.facts.steps_ahead

    def _foresee(self, step: EngineStep) -> None:
        """Count the tokens of a step as computed, and those that it draws as pending."""
        for work in step.works:
            sequence = self.queues.running[work.id]
            sequence.computed += len(work.tokens)
            sequence.is_busy = False
            if work.draws:
                sequence.expect()
                sequence.is_busy = self._is_whole(sequence)  # nothing more is computed

    def _confirm(
        self, sequence: Sequence, work: Work, result: Any, now: float
    ) -> tuple[Event, ...]:
        """Take over what a foreseen step has computed, as `_take_over` does.

        The sequence was counted as computed when the step started. It may have given its pages back
        since, and even have begun anew in others, which are named no farther than they are written.
        """
        self.num_computed += len(work.tokens)
        if result is not None:
            sequence.fulfil(result.token, now)
        if sequence.pages:
            self.tables.name(sequence, min(work.start + len(work.tokens), sequence.computed))
        return () if result is None else self._events(sequence, work, result)

    def _take_over(
        self, sequence: Sequence, work: Work, result: Any, now: float
    ) -> tuple[Event, ...]:
        """Take over computed tokens; return the events of what they write.

        Args:
            sequence: Sequence of the work.
            work: Work of a step.
            result: Result of the work; None where it draws nothing, or after a cancellation.
            now: Seconds on the instance's clock.
        """
        self._advance(sequence, len(work.tokens))
        if result is None:
            return ()
        sequence.append(result.token, now)
        events = self._events(sequence, work, result)
        self.num_guessed += result.num_guessed
        self.num_accepted += len(result.further)
        for number, further in enumerate(result.further, 1):
            if sequence.state == "finished":  # the tokens behind its end are thrown away
                break
            self._advance(sequence, 1)
            sequence.append(further.token, now)
            events += self._events(sequence, work, further, work.index + number)
        return events

    def _advance(self, sequence: Sequence, count: int) -> None:
        """Count computed tokens, and name the pages that they have filled.

        Args:
            sequence: Sequence of the tokens.
            count: Their number.
        """
        self.num_computed += count
        sequence.computed += count
        if sequence.computed >= (sequence.named + 1) * self.facts.page_size:
            self.tables.name(sequence, sequence.computed)

    def _events(
        self, sequence: Sequence, work: Work, result: Result, index: int | None = None
    ) -> tuple[Event, ...]:
        """Return a token that was written, and the end of an answer that it ends."""
        if work.reads_prompt:
            result = sequence.with_prompt(result)
        token = Token(sequence.id, work.index if index is None else index, result)
        reason = result.ending or self._ending(sequence, result.token)
        if reason is None:
            return (token,)
        return token, self.end(sequence, reason, result.message)

    def _ending(self, sequence: Sequence, token: int) -> EndReason | None:
        """Return why an answer ends with its last token; None if it goes on."""
        if token in sequence.request.sampling.stop_ids:
            return "stop"
        return "length" if not sequence.num_pending and self._is_whole(sequence) else None

    def _is_whole(self, sequence: Sequence) -> bool:
        """Return whether an answer has all tokens that it may have, pending ones included."""
        # The only place that ends an answer at this length: `max_tokens` may ask for more.
        number = len(sequence.tokens)
        most = sequence.num_prompt + sequence.request.sampling.max_tokens
        return number >= most or number >= self.facts.max_length
