# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names functions whose files are imported at the first call, such as kernels for other devices."""

import dataclasses
import importlib
import operator
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class DeferredProduct:
    """A function that is imported when it is called.

    Attributes:
        address: `package.module:name`, or `package.module:NAME.field`.
    """

    address: str

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        module, _, name = self.address.partition(":")
        return operator.attrgetter(name)(importlib.import_module(module))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        return self.load()(*arguments, **options)
