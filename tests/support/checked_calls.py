# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the annotations of the library's functions, in their first calls of each file of tests.

tests/conftest.py lets jaxtyping put `jaxtyping.jaxtyped` round every function and dataclass. It
checks shapes; everything else of an annotation is checked by beartype, which by itself refuses an
int where a float is asked for. Python's typing (PEP 484) does not.

Checks of all calls take a third of the time of the suite. Here the first CALLS calls of a function
are checked anew in each file of tests, of a function inside another the first DEFINITIONS of it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping

CALLS = 20
DEFINITIONS = 2

check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
_jaxtyped: Any = jaxtyping.jaxtyped
_definitions: collections.Counter[types.CodeType] = collections.Counter()
_file = 0


def begin_file() -> None:
    """Check the first calls again; called before each file of tests."""
    global _file
    _file += 1
    _definitions.clear()


def install() -> None:
    """Let the functions that jaxtyping's import hook decorates be checked as this module says."""
    jaxtyping.jaxtyped = _checked


def _checked(given: Any = None, *, typechecker: Any) -> Any:
    """Take the place of `jaxtyping.jaxtyped` as a decorator of a function or class."""
    if given is None:
        return functools.partial(_checked, typechecker=typechecker)
    if inspect.isclass(given):
        if dataclasses.is_dataclass(given) and not hasattr(given.__init__, "_is_checked"):
            given.__init__ = _first_calls(given.__init__, typechecker)
        return given
    if "<locals>" in given.__qualname__:
        _definitions[given.__code__] += 1
        if _definitions[given.__code__] > DEFINITIONS:
            return given
    return _first_calls(given, typechecker)


def _first_calls(function: Callable[..., Any], typechecker: Any) -> Any:
    """Return the function with checks, which are made when it is called first."""
    checked: Any = None
    left, file = CALLS, _file

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checked, left, file
        if file != _file:
            left, file = CALLS, _file
        if not left:
            return function(*args, **kwargs)
        left -= 1
        checked = checked or _jaxtyped(function, typechecker=typechecker)
        return checked(*args, **kwargs)

    call._is_checked = True  # pyright: ignore[reportAttributeAccessIssue]
    return call
