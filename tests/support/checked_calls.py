# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The checker that tests/conftest.py puts round every function of the library.

jaxtyping checks shapes with it; everything else of an annotation is checked by beartype, which by
itself refuses an int where a float is asked for. Python's typing (PEP 484) does not.
"""

import beartype

check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
