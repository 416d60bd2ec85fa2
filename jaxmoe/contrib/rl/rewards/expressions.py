# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parses expressions of whole numbers over + - * / and parentheses, and gives their exact value.

    expression = term {("+" | "-") term}
    term       = factor {("*" | "/") factor}
    factor     = digits | "(" expression ")"

Spaces may stand between these. Nothing is executed; length, depth and digits are bounded, so that
the text of a model costs little whatever it is.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

MAX_LENGTH = 200
MAX_DEPTH = 20
MAX_DIGITS = 9
_TOKENS = re.compile(r"[ ]*([0-9]+|[-+*/()])", re.ASCII)


class ExpressionError(ValueError):
    """A text is no expression, or it divides by 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """What an expression says."""

    value: Fraction
    """Exact value."""
    numbers: tuple[int, ...]
    """Numbers in the order of the text."""


def parse(text: str) -> Expression:
    """Return the value and the numbers of an expression.

    Args:
        text: Expression.

    Raises:
        ExpressionError: It is none, it is too long or too deep, or it divides by 0.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"{len(text)} characters, at most {MAX_LENGTH} are read")
    tokens = []
    end = 0
    stripped = text.rstrip(" ")
    while end < len(stripped):
        match = _TOKENS.match(stripped, end)
        if match is None:
            raise ExpressionError(f"{stripped[end:][:10]!r} is neither a number nor an operator")
        tokens.append(match[1])
        end = match.end()
    parser = _Parser(tokens)
    value = parser.expression(0)
    if parser.next is not None:
        raise ExpressionError(f"{parser.next!r} is left over")
    return Expression(value, tuple(parser.numbers))


class _Parser:
    """Recursive descent over tokens."""

    def __init__(self, tokens: list[str]):
        self._tokens = tokens
        self._place = 0
        self.numbers: list[int] = []

    @property
    def next(self) -> str | None:
        """Next token; None at the end."""
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def expression(self, depth: int) -> Fraction:
        """Read an expression and return its value."""
        if depth > MAX_DEPTH:
            raise ExpressionError(f"more than {MAX_DEPTH} parentheses in each other")
        value = self._term(depth)
        while self.next in ("+", "-"):
            sign = 1 if self._taken() == "+" else -1
            value += sign * self._term(depth)
        return value

    def _term(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.next in ("*", "/"):
            operator = self._taken()
            factor = self._factor(depth)
            if operator == "/" and factor == 0:
                raise ExpressionError("divides by 0")
            value = value * factor if operator == "*" else value / factor
        return value

    def _factor(self, depth: int) -> Fraction:
        token = self._taken()
        if token == "(":
            value = self.expression(depth + 1)
            if self._taken() != ")":
                raise ExpressionError("a parenthesis is not closed")
            return value
        if not token.isdigit() or len(token) > MAX_DIGITS:
            raise ExpressionError(f"{token[:10]!r} is no number of at most {MAX_DIGITS} digits")
        self.numbers.append(int(token))
        return Fraction(self.numbers[-1])

    def _taken(self) -> str:
        token = self.next
        if token is None:
            raise ExpressionError("ends early")
        self._place += 1
        return token
