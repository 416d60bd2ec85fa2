# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""How far the answers of an executor follow their grammars."""

from __future__ import annotations

import collections
import dataclasses

from jaxmoe.serve.requests import Grammar, Matcher, Result
from jaxmoe.serve.step import Work

_MOST = 1024
"""Matchers that are kept; another is made again from the tokens of its answer."""


class Matchers:
    """Matchers of the requests that follow a grammar, the last used ones."""

    def __init__(self) -> None:
        self._matchers = collections.OrderedDict[int, tuple[Grammar, Matcher, int]]()

    def at(self, work: Work) -> Matcher:
        """Return the matcher of a request behind the tokens that it has been given.

        Args:
            work: Work that draws a token of an answer with a grammar.
        """
        grammar = work.sampling.grammar
        assert grammar is not None  # the caller has looked
        known_grammar, matcher, count = self._matchers.pop(work.id, (None, None, 0))
        if matcher is None or known_grammar is not grammar or count != work.index or not count:
            matcher = grammar.start()
            for token in work.history[len(work.history) - work.index :]:
                matcher.take(token)
        self._matchers[work.id] = (grammar, matcher, work.index)
        if len(self._matchers) > _MOST:
            self._matchers.popitem(last=False)
        return matcher

    def ending(self, work: Work, result: Result) -> Result:
        """Return the result of a draw, with the end of an answer that its grammar ends.

        Args:
            work: Work that has drawn the token.
            result: Result without it.
        """
        grammar = work.sampling.grammar
        if grammar is None:
            return result
        matcher = self.at(work)
        if result.token not in work.sampling.stop_ids:
            matcher.take(result.token)
        self._matchers[work.id] = (grammar, matcher, work.index + 1)
        if not (matcher.is_done or matcher.failure):
            return result
        self._matchers.pop(work.id)
        reason = "error" if matcher.failure else "stop"
        return dataclasses.replace(result, ending=reason, message=matcher.failure)
