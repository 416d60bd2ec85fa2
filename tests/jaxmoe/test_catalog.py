# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The catalogue: complete, its addresses import, its lines are true, members from outside join."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from jaxmoe import catalog
from jaxmoe.configs import from_json, to_json
from jaxmoe.layers.feed_forwards.moe.config import MoEConfig
from tests.support.source_tree import PACKAGES, ROOT, module_name, modules

UNLISTED = {
    "sharding.expert_parallel.all_gather:ResidentConfig",
    "jaxmoe.checkpoint.huggingface.families.own:OwnFamily",
}
"""Chosen by decoding for itself, never by a user; what is written where no family fits."""
MEMBERS = [(kind, name) for kind in catalog.kinds() for name in catalog.names(kind)]

PLANTED = """
import dataclasses
from typing import ClassVar
from jaxmoe.routing.gates import GateBase

@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HalfGateConfig(GateBase):
    "Half of the score."
    name: ClassVar[str] = "half"
    def __call__(self, selection, scores):
        return 0.5 * scores
"""


def _base(kind: str) -> Any:
    module, _, name = catalog.BASES[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def _subclasses(cls: type) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


@pytest.fixture
def members(monkeypatch):
    """Takes away what a test adds."""
    copies = {kind: dict(rows) for kind, rows in catalog._MEMBERS.items()}
    monkeypatch.setattr(catalog, "_MEMBERS", copies)
    return copies


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_the_address_of_a_member_leads_to_it_and_its_line_is_of_its_docstring(kind, name):
    text = " ".join((inspect.getdoc(catalog.choice(kind, name)) or "").split())
    assert text.startswith(catalog.line(kind, name).removesuffix("."))


def test_every_config_of_a_kind_is_listed():
    for path in modules(*PACKAGES):
        if path.name != "__main__.py":
            importlib.import_module(module_name(path))
    for kind in catalog.kinds():
        within = [_base(one) for one in catalog.kinds() if one != kind]
        within = tuple(base for base in within if issubclass(base, _base(kind)))
        classes = {
            cls
            for cls in _subclasses(_base(kind))
            if cls.__module__.partition(".")[0] in PACKAGES
            and dataclasses.is_dataclass(cls)
            and not inspect.isabstract(cls)
            and not issubclass(cls, within)  # of a kind of its own
            and isinstance(vars(cls).get("name"), str)
            and _address(cls) not in UNLISTED | {None}
        }
        assert {catalog.choice(kind, name) for name in catalog.names(kind)} == classes, kind


def _address(cls: type) -> str | None:
    """Return the address of a class, None where another class has taken its place."""
    place = getattr(sys.modules[cls.__module__], cls.__qualname__, None)
    return f"{cls.__module__}:{cls.__qualname__}" if place is cls else None


def test_a_member_is_imported_when_it_is_named():
    program = (
        "import sys; from jaxmoe import catalog; catalog.names('router');"
        " assert not any(m.startswith('jaxmoe.routing') for m in sys.modules);"
        " catalog.choice('router', 'hash');"
        " assert 'jaxmoe.routing.routers.token_choice.gshard' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_name_of_nothing_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="there is no router 'hsah': did you mean 'hash'?"):
        catalog.choice("router", "hsah")
    with pytest.raises(ValueError, match="no kind 'ruoter' of choice: did you mean 'router'?"):
        catalog.names("ruoter")
    with pytest.raises(KeyError):
        catalog.Registry("router")["hsah"]


def test_a_member_from_outside_is_a_member_like_any_other(members, tmp_path, monkeypatch):
    (tmp_path / "half_gate.py").write_text(PLANTED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = catalog.names("gate")
    catalog.add("gate", "half", "half_gate:HalfGateConfig", "Half of the score.")
    catalog.add("gate", "half", "half_gate:HalfGateConfig", "Half of the score.")
    assert catalog.names("gate") == (*before, "half")
    assert catalog.line("gate", "half") == "Half of the score."
    moe = MoEConfig(gate=catalog.choice("gate", "half")())
    assert from_json(MoEConfig, to_json(moe)) == moe


@pytest.mark.parametrize(
    ("name", "address", "reason"),
    [
        ("half", "nowhere:Gate", "gate 'half' cannot be imported from nowhere:Gate: No module"),
        ("half", "jaxmoe.routing.gates:HalfGate", "cannot be imported from jaxmoe.routing.gates"),
        ("half", "jaxmoe.catalog:Member", "which is no dataclass that extends jaxmoe.routing.gat"),
        ("half", "jaxmoe.routing.gates:SqrtGateConfig", "whose name is 'sqrt': write name: Class"),
    ],
)
def test_a_wrong_address_is_refused_when_it_is_named(members, name, address, reason):
    catalog.add("gate", name, address, "Half of the score.")
    with pytest.raises(ValueError, match=reason):
        catalog.choice("gate", name)


def test_a_member_in_the_place_of_another_and_a_half_address_are_refused_at_once(members):
    with pytest.raises(ValueError, match="gate 'sqrt' is jaxmoe.routing.gates:SqrtGateConfig alre"):
        catalog.add("gate", "sqrt", "half_gate:HalfGateConfig", "Half of the score.")
    with pytest.raises(ValueError, match=r"gate 'half' is 'half_gate', which is no package.module"):
        catalog.add("gate", "half", "half_gate", "Half of the score.")
