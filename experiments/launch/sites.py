# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
r"""Starts sites on this host: replicas of a run that are jobs of their own.

    jaxmoe launch --islands 4 \
        --command "jaxmoe pretrain --run.directory runs/pretrain/four replicas:diloco"

Each site runs the command with `$JAXMOE_ISLAND` (its number and where the sites meet) and
`$JAXMOE_ISLANDS_KEY`. In the command, `{island}` becomes the number; without it, `--run.directory
DIR` becomes DIR-island0, DIR-island1, and so on. A site may have several processes.

Sites are supervised one by one, with the restarts and exit codes of `--supervise --help`: one
that is restarted joins the others. None is restarted after all others have ended. The exit code is
0 if all sites ended with 0, otherwise that of a site that failed, as with `--supervise`.

The output of the first site is printed. That of each is in `--run.directory`, under island<i>,
with a summary.json.

On several hosts, give all the same key in `$JAXMOE_ISLANDS_KEY`, `--islands_of` and
`--islands_address`, and each its own `--islands_first`; the host with `--islands_first 0` runs the
coordinator. `--islands 0` runs the coordinator alone. A coordinator that is started again with the
same `--run.directory` knows how rounds closed, unless it starts all sites anew.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from experiments.cli import flags
from experiments.cli.exit_codes import ExitCode
from experiments.cli.output import write
from experiments.launch.config import RestartConfig, SuperviseConfig
from experiments.launch.signals import Signals
from experiments.launch.supervise import StartResult, consequence, supervise
from jaxmoe.contrib.slow_links.sites.config import KEY_VARIABLE, VARIABLE, SiteConfig, key_of
from jaxmoe.contrib.slow_links.sites.coordinator import Coordinator
from jaxmoe.contrib.slow_links.sites.directory import DirectoryClosings
from jaxmoe.contrib.slow_links.sites.errors import TransportError
from jaxmoe.contrib.slow_links.sites.lease import CoordinatorLease
from jaxmoe.contrib.slow_links.sites.transport import MessageSizes
from jaxmoe.run.directory import RunDirectory

_PLACE = "{island}"
_EXCHANGE = "exchange"
"""Folder of the directory transport, and of the coordinator's closings."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SitesConfig(RestartConfig):
    """Sites to start, where they meet, and limits of restarts."""

    command: str = "jaxmoe pretrain --run.directory runs/pretrain/islands"
    """Command of each process of each site."""
    islands: int = 1
    """Sites on this host; 0 runs the coordinator alone."""
    islands_transport: Literal["tcp", "directory"] = "tcp"
    """Connection between the sites: a coordinator, or a shared directory."""
    islands_address: str | None = None
    """host:port of the coordinator, or the shared directory; on this host when None."""
    islands_quorum: int | None = None
    """Fewest sites that must be there for a round to close; more than half of them when None."""
    islands_grace: float = 60.0
    """Seconds that a round waits for sites after its first message."""
    islands_of: int | None = None
    """Sites on all hosts; those of this one when None."""
    islands_first: int = 0
    """Number of the first site of this host."""
    islands_max_bytes: int = 1 << 34
    """Largest message that the coordinator accepts, in bytes."""

    def __post_init__(self):
        if self.islands < 0:
            raise ValueError(f"islands={self.islands} must be at least 0")
        if self.islands == 0 and (self.islands_of is None or self.islands_address is None):
            raise ValueError(
                "islands=0 runs the coordinator alone: give --islands_of and --islands_address,"
                " such as --islands_of 4 --islands_address 10.0.0.1:8477"
            )
        if self.islands == 0 and self.islands_transport == "directory":
            raise ValueError("islands=0 has nothing to run: a directory needs no coordinator")
        if not 0 <= self.islands_first <= self.of - self.islands:
            raise ValueError(
                f"islands_first={self.islands_first} and islands={self.islands} must lie within"
                f" islands_of={self.of}: sites count from 0, over all hosts"
            )
        if self.of > self.islands and self.islands_address is None:
            raise ValueError(
                f"islands_of={self.of} are more than the islands={self.islands} of this host: give"
                " the --islands_address at which they meet"
            )
        if self.islands_max_bytes < 1:
            raise ValueError(f"islands_max_bytes={self.islands_max_bytes} must be at least 1")
        self.supervisor("true")
        self.site(0, "directory:.")
        if _PLACE not in self.command and self.islands and _directory(self.words) is None:
            if any(word.startswith("experiments.") for word in self.words):
                raise ValueError(
                    "command has no --run.directory, and sites cannot share the default one: add"
                    " one, which gets the suffix -island0, -island1, ..."
                )

    @property
    def of(self) -> int:
        """Number of sites on all hosts."""
        return self.islands if self.islands_of is None else self.islands_of

    @property
    def here(self) -> range:
        """Numbers of the sites of this host."""
        return range(self.islands_first, self.islands_first + self.islands)

    @property
    def words(self) -> list[str]:
        """Command split into words."""
        return shlex.split(self.command)

    def command_of(self, member: int) -> str:
        """Return the command of a site.

        Args:
            member: Number of the site.
        """
        if _PLACE in self.command:
            return self.command.replace(_PLACE, str(member))
        arguments = self.words
        if (place := _directory(arguments)) is not None:
            arguments[place] = f"{arguments[place].rstrip('/')}-island{member}"
        return shlex.join(arguments)

    def supervisor(self, command: str) -> SuperviseConfig:
        """Return the config of the supervisor of a site.

        Args:
            command: Command of the site.
        """
        fields = dataclasses.fields(RestartConfig)
        limits: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields}
        return SuperviseConfig(command=command, **limits)

    def site(self, member: int, transport: str) -> SiteConfig:
        """Return what a site reads from its environment.

        Args:
            member: Number of the site.
            transport: Where the sites meet, as `SiteConfig.transport`.
        """
        return SiteConfig(
            member=member,
            of=self.of,
            transport=transport,
            quorum=self.islands_quorum,
            grace=self.islands_grace,
        )


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code of the sites."""
    prog = "jaxmoe launch --islands"
    with flags.exit_on_bad_configuration():
        config = flags.parse_flags(SitesConfig(), argv, prog, __doc__ or "")
        if config.of > config.islands and not os.environ.get(KEY_VARIABLE):
            raise ValueError(
                f"sites on several hosts need the same secret in ${KEY_VARIABLE} on each, such as"
                " that of `openssl rand -hex 32`"
            )
        directory = RunDirectory(config.run.directory or f"runs/launch/{config.run.name}")
        directory.check_free_of_runs()
        directory.acquire()
        exchange = directory.path / _EXCHANGE
        if config.islands == config.of:
            shutil.rmtree(exchange, ignore_errors=True)  # of sites that ended before
    environment = {KEY_VARIABLE: os.environ.get(KEY_VARIABLE) or secrets.token_hex(32)}
    with Signals() as signals, _meeting(config, exchange, environment) as transport:
        if config.islands == 0:
            write(f"sites: coordinator on {transport}")
            while signals.number is None:
                time.sleep(0.1)
            exits: dict[int, StartResult] = {}
        else:
            exits = _supervise_all(config, directory, signals, transport, environment)
    bad = {member: end for member, end in exits.items() if end.code != ExitCode.DONE}
    first = min(bad, key=lambda member: consequence(bad[member].code)) if bad else None
    code = int(ExitCode.DONE) if first is None else exits[first].code
    directory.write_summary(
        {
            "status": "ended",
            "command": config.command,
            "islands": {str(member): dataclasses.asdict(end) for member, end in exits.items()},
            "code": code,
        }
    )
    directory.release()
    return code


@contextlib.contextmanager
def _meeting(
    config: SitesConfig, exchange: pathlib.Path, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield where the sites meet; the coordinator runs meanwhile, if it is on this host."""
    if config.islands_transport == "directory":
        yield f"directory:{pathlib.Path(config.islands_address or exchange).absolute()}"
    elif config.islands_first > 0:
        yield f"tcp://{config.islands_address}"
    else:
        with _coordinator(config, exchange, key_of(environment)) as coordinator:
            yield f"tcp://{config.islands_address or coordinator.address}"


def _coordinator(config: SitesConfig, exchange: pathlib.Path, key: bytes | None) -> Coordinator:
    sizes = MessageSizes(update=config.islands_max_bytes, state=config.islands_max_bytes)
    with flags.exit_on_bad_configuration(ValueError, TransportError):
        return Coordinator(
            config.islands_address or "127.0.0.1:0",
            sizes,
            key=key,
            lease=CoordinatorLease(exchange / "lease"),
            closings=DirectoryClosings(exchange / "closings", 0, key),
        )


def _supervise_all(
    config: SitesConfig,
    directory: RunDirectory,
    signals: Signals,
    transport: str,
    environment: Mapping[str, str],
) -> dict[int, StartResult]:
    """Supervise each site in a thread; return how each ended."""
    exits: dict[int, StartResult] = {}

    def is_wanted() -> bool:
        # Without others a site that is started again would wait for rounds that never end.
        return config.of > config.islands or len(exits) < config.islands - 1 or config.of == 1

    def run(member: int) -> None:
        member_directory = RunDirectory(directory.path / f"island{member}")
        member_directory.acquire()
        exits[member] = supervise(
            config.supervisor(config.command_of(member)),
            member_directory,
            signals,
            name=f"site {member}",
            environment={**environment, VARIABLE: config.site(member, transport).to_text()},
            is_shown=member == config.islands_first,
            is_wanted=is_wanted,
        )
        member_directory.release()

    with concurrent.futures.ThreadPoolExecutor(config.islands, thread_name_prefix="site") as pool:
        for done in [pool.submit(run, member) for member in config.here]:
            done.result()
    return exits


def _directory(arguments: Sequence[str]) -> int | None:
    """Return the place of the word that ends with the run directory; None without one."""
    for place, word in enumerate(arguments):
        if word.startswith("--run.directory="):
            return place
        if word == "--run.directory" and place + 1 < len(arguments):
            return place + 1
    return None
