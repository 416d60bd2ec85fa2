# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`POST /reshard`: answers in words, one change at a time, and serving goes on."""

import threading

import httpx2 as httpx

from jaxmoe.contrib.fleet.endpoint import reshard_routes
from jaxmoe.contrib.fleet.engine import FleetEngine
from jaxmoe.contrib.fleet.layouts import Resharding
from sharding import MeshConfig
from tests.support.endpoint import Speller, serving


class Adopting(Speller):
    """Takes over from another executor."""

    def adopt(self, other):
        return Resharding(weight_bytes=8, page_bytes=4, seconds=0.25)


class Layouts:
    """Meshes of up to four devices; a change waits for its gate."""

    def __init__(self):
        self.gate, self.begun, self.error = threading.Event(), threading.Event(), None

    def check(self, number, executor, mesh):
        if mesh.expert * mesh.tensor > 4:
            raise ValueError(f"expert={mesh.expert} needs more than 4 devices")

    def laid_out(self, number, executor, mesh):
        self.begun.set()
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        found = Adopting()
        found.mesh = mesh
        return found


def resharding(layouts, **given):
    """A server of an instance whose mesh may change."""
    return serving(
        make_engine=lambda executor, *config, **codec: FleetEngine(
            [executor], *config, layouts=layouts, **codec
        ),
        routes=reshard_routes,
        **given,
    )


def test_the_mesh_changes_by_command_while_requests_are_answered():
    layouts, found = Layouts(), []
    with resharding(layouts, key="secret") as (address, endpoint, _):
        headers = {"Authorization": "Bearer secret"}

        def post(body, route="/reshard", given=headers):
            return httpx.post(f"{address}{route}", json=body, headers=given, timeout=60)

        assert post({"expert": 2}, given={}).status_code == 401
        for body, words in [
            ({"expert": 8}, "needs more than 4 devices"),
            ({"experts": 2}, "experts is not a field of this request: did you mean 'expert'?"),
            ({"expert": 0}, "expert=0 must be an integer of at least 1"),
            ({}, "names no axis of the mesh"),
            ([4], "the body must be a JSON object"),
        ]:
            answer = post(body)
            assert answer.status_code == 400 and words in answer.text, answer.text
        thread = threading.Thread(target=lambda: found.append(post({"expert": 2, "tensor": 2})))
        thread.start()
        assert layouts.begun.wait(60)
        busy = post({"expert": 4})
        assert busy.status_code == 409 and "another change of the mesh" in busy.text
        asked = {"model": "speller", "prompt": "a", "max_tokens": 2, "seed": 0}
        assert post(asked, "/v1/completions").json()["choices"][0]["text"] == "bc"
        layouts.gate.set()
        thread.join()
        cost = found[0].json()
        assert found[0].status_code == 200 and cost["mesh"] == {"expert": 2, "tensor": 2}
        assert (cost["devices"], cost["weight_bytes"], cost["page_bytes"]) == (4, 8, 4)
        assert cost["seconds"] >= 0 and cost["pause_seconds"] == 0.25
        assert endpoint._served.engine.resharder.mesh == MeshConfig(expert=2, tensor=2)
        layouts.error = RuntimeError("out of memory")
        lost = post({"expert": 1})  # the tensor axis stays
        assert lost.status_code == 500 and "the change of the mesh has failed" in lost.text
        assert post(asked, "/v1/completions").json()["choices"][0]["text"] == "bc"
    with resharding(None) as (address, _, _):
        fixed = httpx.post(f"{address}/reshard", json={"expert": 2})
        assert fixed.status_code == 400 and "the mesh of this engine is fixed" in fixed.text


def test_metrics_of_each_instance():
    with serving([Speller(), Speller()], make_engine=FleetEngine) as (address, _, _):
        for _ in range(2):
            asked = {"prompt": "a", "max_tokens": 2}
            assert httpx.post(f"{address}/v1/completions", json=asked).status_code == 200
        text = httpx.get(f"{address}/metrics").text
        stats = httpx.get(f"{address}/stats").json()
    for number in ("0", "1"):
        assert f'jaxmoe_pages{{instance="{number}",model="speller"}} 64.0' in text
        assert f'jaxmoe_requests_moved_total{{instance="{number}",model="speller"}} 0.0' in text
    assert stats["pages_total"] == 128 and stats["num_submitted"] == 2
    assert stats["expert_load"] == [[2.0, 6.0], [4.0, 4.0]]
