# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A site as a process: exchanges random bytes, and writes a line for each round.

    python tests/support/site_process.py LOG        with JAXMOE_ISLAND and JAXMOE_ISLANDS_KEY

It ends after three rounds with all sites that follow one without, or, with the word `lost`, after
three rounds without one. It imports no JAX, so that it starts in a tenth of a second.
"""

import hashlib
import json
import pathlib
import random
import sys
import time
import types

if __name__ == "__main__":
    root = pathlib.Path(__file__).resolve().parents[2]
    package = types.ModuleType("jaxmoe")  # without the imports of jaxmoe/__init__.py
    package.__path__ = [str(root / "jaxmoe")]
    sys.modules["jaxmoe"] = package

from jaxmoe.contrib.slow_links.sites import LeftOutError, MessageSizes, SiteConfig, connect

SIZES = MessageSizes(update=1 << 18, state=1 << 10)


def payload(number: int, member: int) -> bytes:
    """Return the update of a site in a round."""
    return random.Random(f"{number}.{member}").randbytes(20_000 + 1000 * member)


def main(log: pathlib.Path, ends_without: bool) -> None:
    """Run until three rounds had the wanted members."""
    config = SiteConfig.from_environment()
    assert config is not None
    rounds, inner = connect(config, SIZES), random.Random(config.member)
    state, seen, has_lost = rounds.start() or b"", 0, ends_without
    has_lost = has_lost or rounds.number > 0  # started again
    while seen < 3:
        time.sleep(inner.random() / 50)
        began = time.monotonic()
        try:
            found = rounds.exchange(payload(rounds.number, config.member))
            digest = hashlib.sha256(state)
            for member, update in found.payloads.items():
                assert update == payload(found.number, member)
                digest.update(update)
            state = digest.digest()
            agreement = rounds.agree(state)
        except LeftOutError:
            state = rounds.join()
            continue
        assert agreement.is_same
        if agreement.sends_state:
            rounds.post_state(state)
        line = {
            "number": found.number,
            "members": found.members,
            "state": state.hex(),
            "seconds": time.monotonic() - began,
        }
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        is_whole = len(found.members) == config.of
        has_lost = has_lost or not is_whole
        seen += has_lost and is_whole != ends_without
    rounds.close()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:] == ["lost"])
