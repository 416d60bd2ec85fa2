# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of a request; refuses wrong types and unknown names."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxmoe.configs import closest
from jaxmoe.serve.http.errors import HTTPError, wrong

_MOST_BIAS = 100.0
"""Bias of a token at most, as in OpenAI's API."""
_MOST_DIGITS = 20
"""Digits of a token id at most; Python reads no number of thousands of digits."""


class BodyFields:
    """Fields of one request; each is read by its type."""

    def __init__(self, values: Any, names: Collection[str], param: str | None = None):
        """Take the fields of a body.

        Args:
            values: JSON value of the body.
            names: Fields that will be read.
            param: Field of the body that these are the fields of; None for the body itself.

        Raises:
            HTTPError: The body is no object, or has an unknown field.
        """
        if not isinstance(values, Mapping):
            raise HTTPError(
                400,
                f"{param or 'the body'} must be a JSON object, found {type(values).__name__}",
                param=param,
            )
        for name in values:
            if name not in names:
                hint = closest(name, sorted(names))
                raise wrong(name, f" is not a field of this request{hint}", "unknown_field")
        self._values = {name: value for name, value in values.items() if value is not None}

    def any(self, name: str) -> Any:
        """Return a value of any type; None if it is missing or null."""
        return self._values.get(name)

    def text(self, name: str, default: str = "") -> str:
        """Return a text."""
        return self._check_type(name, default, lambda value: isinstance(value, str), "a text")

    def choice(self, name: str, values: tuple[str, ...], default: str) -> str:
        """Return one of several texts, of any case."""
        value = self.text(name, default)
        if value.lower() not in values:
            raise wrong(name, f"={_short(value)} must be {' or '.join(values)}")
        return value.lower()

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        return self._check_type(
            name, default, lambda value: isinstance(value, bool), "true or false"
        )

    def number(self, name: str, default: float, low: float, high: float = math.inf) -> float:
        """Return a number within bounds."""

        def fits(value: Any) -> bool:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and low <= value <= high and math.isfinite(value)

        return float(self._check_type(name, default, fits, f"a number {_bounds(low, high)}"))

    def integer(self, name: str, default: Any, low: int, high: float = math.inf) -> Any:
        """Return an integer within bounds; the default may be None."""

        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

        return self._check_type(name, default, fits, f"an integer {_bounds(low, high)}")

    def ids(self, name: str, most: int) -> tuple[int, ...]:
        """Return a list of token ids."""

        def fits(value: Any) -> bool:
            is_list = isinstance(value, list) and len(value) <= most
            return is_list and all(type(token) is int and token >= 0 for token in value)

        return tuple(self._check_type(name, [], fits, f"a list of up to {most} token ids"))

    def biases(self, name: str, most: int) -> tuple[tuple[int, float], ...]:
        """Return an object of token ids, as texts, and numbers from -100 to 100."""

        def is_bias(token: Any, value: Any) -> bool:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_id = token.isdecimal() and len(token) <= _MOST_DIGITS
            return is_id and is_number and -_MOST_BIAS <= value <= _MOST_BIAS

        def fits(value: Any) -> bool:
            is_object = isinstance(value, Mapping) and len(value) <= most
            return is_object and all(is_bias(*item) for item in value.items())

        rule = f"an object of up to {most} token ids with biases from -100 to 100"
        biases = self._check_type(name, {}, fits, rule)
        return tuple({int(token): float(bias) for token, bias in biases.items()}.items())

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return a text or a list of texts, none of them empty."""
        value = self._values.get(name, ())
        texts = (value,) if isinstance(value, str) else value
        is_list = isinstance(texts, list | tuple) and len(texts) <= most
        if not is_list or not all(isinstance(text, str) and text for text in texts):
            raise wrong(name, f"={_short(value)} must be a text or up to {most} texts, none empty")
        return tuple(texts)

    def _check_type(self, name: str, default: Any, fits: Callable[[Any], bool], rule: str) -> Any:
        if name not in self._values:
            return default
        value = self._values[name]
        if not fits(value):
            raise wrong(name, f"={_short(value)} must be {rule}")
        return value


def _bounds(low: float, high: float) -> str:
    text = f"from {_plain(low)} to {_plain(high)}"
    return text if high < math.inf else f"of at least {_plain(low)}"


def _plain(value: float) -> str:
    """Return a number with all digits of an integer."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
