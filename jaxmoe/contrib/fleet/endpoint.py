# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers `POST /reshard`: the mesh of all instances changes while they serve.

    curl http://127.0.0.1:8000/reshard -d '{"expert": 4}'

An axis that is left out stays as it is. The answer comes when the change is done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from typing import Any

from jaxmoe.contrib.fleet.engine import FleetEngine
from jaxmoe.contrib.fleet.resharding import BusyError, Resharder
from jaxmoe.serve.http.errors import HTTPError
from jaxmoe.serve.http.fields import BodyFields
from jaxmoe.serve.http.served import Route

_AXES = ("expert", "tensor")


def reshard_routes(engine: FleetEngine) -> dict[str, Route]:
    """Return the route that changes the mesh of an engine, for `Served.routes`.

    Args:
        engine: Engine of the fleet.
    """
    return {"/reshard": functools.partial(change_mesh, resharder=engine.resharder)}


async def change_mesh(values: Any, resharder: Resharder) -> dict[str, Any]:
    """Return what a change of the mesh has cost, when it is done.

    Args:
        values: JSON value of the body.
        resharder: Changes the mesh.

    Raises:
        HTTPError: 400 for a mesh that cannot be, 409 while another change is going on, 500 if the
            change fails.
    """
    fields = BodyFields(values, _AXES)
    sizes = {axis: fields.integer(axis, 0, 1) for axis in _AXES if fields.any(axis) is not None}
    if not sizes:
        raise HTTPError(400, 'the body names no axis of the mesh: send {"expert": 4}')
    try:
        mesh = resharder.with_sizes(sizes)
        done = await asyncio.to_thread(resharder.begin, mesh)
    except ValueError as error:
        raise HTTPError(400, str(error)) from error
    except BusyError as error:
        raise HTTPError(409, str(error), code="busy", retry_after=30) from error
    try:  # the change goes on if the client goes away
        seconds = await asyncio.shield(asyncio.wrap_future(done))
    except (ValueError, RuntimeError) as error:
        message = f"the change of the mesh has failed: {type(error).__name__}: {error}"
        raise HTTPError(500, message, code="engine_error") from error
    shape = {axis: getattr(mesh, axis) for axis in _AXES}
    return {"mesh": shape, "devices": math.prod(mesh.sizes)} | dataclasses.asdict(seconds)
