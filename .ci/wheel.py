# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel: the four packages of the checkout, under the one name `jaxmoe`.

    sharding        jaxmoe/sharding       imported as jaxmoe.sharding
    pallas_kernels  jaxmoe/kernels        imported as jaxmoe.kernels
    experiments     jaxmoe/experiments    imported as jaxmoe.experiments, run as `jaxmoe NAME`

Imports, and addresses of modules in strings, get these names, so that nothing depends on which
folder named `sharding` or `experiments` Python finds first. The names of the checkout are
installed, too: packages of one file that stand for the others.
"""

from __future__ import annotations

import io
import pathlib
import re
import shutil
import tempfile
import tokenize
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = {"sharding": "sharding", "pallas_kernels": "kernels", "experiments": "experiments"}
"""Folder within `jaxmoe` of each package that stands beside it."""

_NAMES = "|".join(FOLDERS)
_IMPORT = re.compile(rf"^(\s*(?:from|import) )({_NAMES})\b", re.MULTILINE)
_ADDRESS = re.compile(rf"(?<![\w./])({_NAMES})\.(?=[a-z_{{])")
_STAND_IN = '''\
# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The name of `{package}` in a checkout; see `jaxmoe.kernels.public_names`."""

import importlib
import sys

from jaxmoe.kernels.public_names import stand_for

stand_for(__name__, "{package}")
sys.modules[__name__] = importlib.import_module("{package}")
'''


class OneName(BuildHookInterface):
    """Writes the sources of a wheel with the names that they have in it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the sources to the wheel, unless it is an editable one, which has the checkout."""
        if version == "editable":
            return
        root = pathlib.Path(self.root)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxmoe-wheel-"))
        _write(root / "jaxmoe", self.folder / "jaxmoe")
        for name, folder in FOLDERS.items():
            _write(root / name, self.folder / "jaxmoe" / folder)
            (self.folder / name).mkdir()
            text = _STAND_IN.format(package=f"jaxmoe.{folder}")
            (self.folder / name / "__init__.py").write_text(text, encoding="utf-8")
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                build_data["force_include"][str(path)] = str(path.relative_to(self.folder))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the written sources."""
        if version != "editable":
            shutil.rmtree(self.folder)


def renamed(source: str) -> str:
    """Return the text of a Python file in which the packages have their names in the wheel."""
    lines = _IMPORT.sub(lambda match: match[1] + _package(match[2]), source).splitlines(True)
    tokens = list(tokenize.generate_tokens(io.StringIO("".join(lines)).readline))
    # From the end, so that the positions of what stands before stay true.
    for before, token in reversed(list(zip([None, *tokens], tokens, strict=False))):
        text = _renamed_text(token, before)
        if text != token.string:
            _replace(lines, token, text)
    return "".join(lines)


def _renamed_text(token: tokenize.TokenInfo, before: tokenize.TokenInfo | None) -> str:
    """Return the text of a string with other names; other tokens have their own.

    In an f-string, `sharding.spec` may be an expression: only an address at its beginning counts.
    """
    kind = tokenize.tok_name[token.type]
    text = token.string
    if kind not in ("STRING", "FSTRING_MIDDLE"):
        return text
    prefix = re.match(r"[A-Za-z]*", text)[0].lower() if kind == "STRING" else ""
    if kind == "STRING" and "f" not in prefix:
        return _ADDRESS.sub(lambda match: _package(match[1]) + ".", text)
    if kind == "STRING":
        start = re.match(r"[A-Za-z]*[\"']+", text)[0]
    elif before is not None and tokenize.tok_name[before.type] == "FSTRING_START":
        start = ""
    else:
        return text
    match = _ADDRESS.match(text, len(start))
    if match is None:
        return text
    return f"{start}{_package(match[1])}.{text[match.end() :]}"


def _package(name: str) -> str:
    return f"jaxmoe.{FOLDERS[name]}"


def _replace(lines: list[str], token: tokenize.TokenInfo, text: str) -> None:
    (first, start), (last, end) = token.start, token.end
    whole = lines[first - 1][:start] + text + lines[last - 1][end:]
    lines[first - 1 : last] = whole.splitlines(True)


def _write(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a package; Python files and stubs with other names."""
    for path in sorted(source.rglob("*")):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".py", ".pyi"):
            copy.write_text(renamed(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copyfile(path, copy)
