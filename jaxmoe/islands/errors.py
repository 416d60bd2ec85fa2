# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exceptions of exchanges between islands."""

from __future__ import annotations

from jaxmoe.errors import JaxmoeError


class IslandError(JaxmoeError):
    """Base class of the exceptions of this package."""


class FrameError(IslandError, ValueError):
    """A frame is damaged, too long, of another round or version, or not signed with the key."""


class TransportError(IslandError, OSError):
    """A transport did not answer in time, or refused a message."""


class LeftOutError(IslandError):
    """A round closed without this island, which has to join again (`Rounds.join`)."""


class QuorumError(IslandError, TimeoutError):
    """Too few islands posted within the timeout of a round."""


class StoppedError(IslandError):
    """This island was asked to stop while it waited for the others."""
