# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`SiteConfig`: what a site reads from its environment, and `connect`.

    JAXMOE_ISLAND="member=2 of=4 transport=tcp://10.0.0.1:8477"
    JAXMOE_ISLAND="member=2 of=4 transport=directory:/shared/run quorum=2 grace=120"
    JAXMOE_ISLANDS_KEY=...       the secret that all sites share

`jaxmoe launch --islands 4` sets both for sites on one host.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from jaxmoe.contrib.slow_links.sites.coordinator import host_and_port
from jaxmoe.contrib.slow_links.sites.directory import DirectoryTransport
from jaxmoe.contrib.slow_links.sites.frames import MAX_MEMBERS
from jaxmoe.contrib.slow_links.sites.rounds import Rounds
from jaxmoe.contrib.slow_links.sites.rules import Clock, RoundRules
from jaxmoe.contrib.slow_links.sites.tcp import TcpTransport
from jaxmoe.contrib.slow_links.sites.transport import MessageSizes, Transport

VARIABLE = "JAXMOE_ISLAND"
"""Environment variable with the fields of `SiteConfig`."""
KEY_VARIABLE = "JAXMOE_ISLANDS_KEY"
"""Environment variable with the shared secret."""

_TCP = "tcp://"
_DIRECTORY = "directory:"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SiteConfig:
    """A site of a run, and limits of its rounds."""

    member: int
    """Number of this site; those that start the run count from 0."""
    of: int
    """Number of sites that start the run."""
    transport: str
    """tcp://host:port of the coordinator, or directory:PATH of a shared directory."""
    quorum: int | None = None
    """Fewest sites that must be there for a round to close, those that wait to join included;
    more than half of them when None."""
    grace: float = 60.0
    """Seconds that a round waits for members after its first message."""
    timeout: float = 3600.0
    """Seconds to wait for a quorum, for admission and for a state."""
    poll: float = 0.05
    """Seconds between looks at the transport."""

    def __post_init__(self):
        if not 1 <= self.of <= MAX_MEMBERS:
            raise ValueError(f"site of={self.of} must be from 1 to {MAX_MEMBERS}")
        if not 0 <= self.member < MAX_MEMBERS:
            raise ValueError(f"site member={self.member} must be from 0 to {MAX_MEMBERS - 1}")
        if self.quorum is not None and not 1 <= self.quorum <= self.of:
            raise ValueError(f"site quorum={self.quorum} must be from 1 to of={self.of}")
        for field in ("grace", "timeout", "poll"):
            if not getattr(self, field) > 0:
                raise ValueError(f"site {field}={getattr(self, field)} must be more than 0 s")
        if self.transport.startswith(_TCP):
            host_and_port(self.transport.removeprefix(_TCP))
        elif not self.transport.removeprefix(_DIRECTORY) or not self.transport.startswith(
            _DIRECTORY
        ):
            raise ValueError(
                f"site transport={self.transport} must be {_TCP}host:port or {_DIRECTORY}PATH"
            )

    @property
    def rules(self) -> RoundRules:
        """Limits of a round."""
        return RoundRules(
            founders=self.of,
            quorum=self.of // 2 + 1 if self.quorum is None else self.quorum,
            grace=self.grace,
            timeout=self.timeout,
            poll=self.poll,
        )

    def to_text(self) -> str:
        """Return the value of the environment variable."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return shlex.join(f"{name}={value}" for name, value in fields if value is not None)

    @classmethod
    def from_text(cls, text: str) -> SiteConfig:
        """Return the config of `to_text`.

        Raises:
            ValueError: A field is unknown, missing, or not of its type.
        """
        types = {"member": int, "of": int, "transport": str, "quorum": int}
        types |= dict.fromkeys(("grace", "timeout", "poll"), float)
        fields: dict[str, Any] = {}
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            try:
                fields[name] = types[name](value)
            except (KeyError, ValueError):
                raise ValueError(
                    f"{VARIABLE} has {word!r}: its fields are {', '.join(types)}, as in"
                    ' "member=2 of=4 transport=tcp://10.0.0.1:8477"'
                ) from None
        if missing := {"member", "of", "transport"} - fields.keys():
            raise ValueError(f"{VARIABLE}={text!r} lacks {' and '.join(sorted(missing))}")
        return cls(**fields)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> SiteConfig | None:
        """Return the config of this process; None if it is no site.

        Args:
            environment: Variables; `os.environ` when None.

        Raises:
            ValueError: A field is unknown, missing, or not of its type.
        """
        text = (os.environ if environment is None else environment).get(VARIABLE)
        return cls.from_text(text) if text else None


def key_of(environment: Mapping[str, str] | None = None) -> bytes | None:
    """Return the shared secret, None if there is none.

    Args:
        environment: Variables; `os.environ` when None.
    """
    text = (os.environ if environment is None else environment).get(KEY_VARIABLE)
    return text.encode() if text else None


def connect(
    config: SiteConfig,
    sizes: MessageSizes,
    *,
    key: bytes | None = None,
    transport: Transport | None = None,
    clock: Clock | None = None,
    check: Callable[[], None] = lambda: None,
) -> Rounds:
    """Return the rounds of a site; `Rounds.start` is next.

    Args:
        config: Site.
        sizes: Largest sizes of messages, the same on all sites.
        key: Shared secret; that of the environment when None.
        transport: Transport in place of that of the config, such as your own.
        clock: Source of time.
        check: Called while the site waits; may raise `StoppedError`, which ends the wait.
    """
    key = key_of() if key is None else key
    if transport is None and config.transport.startswith(_TCP):
        address = config.transport.removeprefix(_TCP)
        transport = TcpTransport(
            address, config.member, sizes, key, patience=config.timeout, check=check
        )
    elif transport is None:
        path = config.transport.removeprefix(_DIRECTORY)
        transport = DirectoryTransport(path, config.member, sizes, key)
    return Rounds(config.member, transport, config.rules, clock, check)
