# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""How far the answers of an executor follow their grammars."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from jaxmoe.serve.requests import Grammar, Matcher, Result
from jaxmoe.serve.sequence import PENDING
from jaxmoe.serve.step import Work

_LEAST = 1024
"""Matchers that are kept at least; another is made again from the tokens of its answer."""


class Matchers:
    """Matchers of the requests that follow a grammar, the last used ones."""

    def __init__(self, rows: int) -> None:
        """Begin without matchers.

        Args:
            rows: Rows of a step; the matchers of two steps are always kept.
        """
        self._most = max(_LEAST, 2 * rows)
        self._matchers = collections.OrderedDict[int, tuple[Grammar, Matcher, int]]()

    def mask(self, work: Work) -> np.ndarray | None:
        """Return the tokens that may follow those of an answer.

        Args:
            work: Work that draws a token; the steps before it have been taken over by `ending`.

        Returns:
            A bit of a uint32 each [ceil(V / 32)]; None for all: where there is no grammar, and
            where its answer has ended with the token before, and this one is thrown away.
        """
        if work.sampling.grammar is None:
            return None
        if work.history[-1] == PENDING and work.id not in self._matchers:
            return None
        return self._at(work).mask()

    def _at(self, work: Work) -> Matcher:
        """Return the matcher of a request behind the tokens that it has been given."""
        grammar = work.sampling.grammar
        assert grammar is not None  # the caller has looked
        known_grammar, matcher, count = self._matchers.pop(work.id, (None, None, 0))
        if matcher is None or known_grammar is not grammar or count != work.index or not count:
            matcher = grammar.start()
            for token in work.history[len(work.history) - work.index :]:
                matcher.take(token)
        self._matchers[work.id] = (grammar, matcher, work.index)
        if len(self._matchers) > self._most:
            self._matchers.popitem(last=False)
        return matcher

    def ending(self, work: Work, result: Result) -> Result:
        """Return the result of a draw, with the end of an answer that its grammar ends.

        Args:
            work: Work that has drawn the token.
            result: Result without it.
        """
        grammar = work.sampling.grammar
        if grammar is None or work.id not in self._matchers:
            return result
        matcher = self._at(work)
        if result.token not in work.sampling.stop_ids:
            matcher.take(result.token)
        self._matchers[work.id] = (grammar, matcher, work.index + 1)
        if not (matcher.is_done or matcher.failure):
            return result
        self._matchers.pop(work.id)
        reason = "error" if matcher.failure else "stop"
        return dataclasses.replace(result, ending=reason, message=matcher.failure)
