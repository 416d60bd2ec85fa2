# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names functions whose files are imported at the first call, such as kernels for other devices."""

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any


def deferred(address: str) -> Callable[..., Any]:
    """Return a function that is imported when it is first called.

    Args:
        address: `package.module:name`, or `package.module:NAME.field`.
    """
    module, _, name = address.partition(":")

    @functools.cache
    def function() -> Callable[..., Any]:
        return operator.attrgetter(name)(importlib.import_module(module))

    def call(*arguments: Any, **options: Any) -> Any:
        return function()(*arguments, **options)

    return call
