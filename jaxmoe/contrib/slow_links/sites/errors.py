# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exceptions of exchanges between sites."""

from __future__ import annotations

from jaxmoe.errors import JaxmoeError


class SiteError(JaxmoeError):
    """Base class of the exceptions of this package."""


class FrameError(SiteError, ValueError):
    """A frame is damaged, too long, of another round or version, or not signed with the key."""


class TransportError(SiteError, OSError):
    """A transport did not answer in time, or refused a message."""


class LeftOutError(SiteError):
    """A round closed without this site, which has to join again (`Rounds.join`)."""


class QuorumError(SiteError, TimeoutError):
    """Too few sites posted within the timeout of a round."""


class StoppedError(SiteError):
    """This site was asked to stop while it waited for the others."""
