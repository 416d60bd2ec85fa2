# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.training.repeated.rows import RepeatedBackward as RepeatedBackward
from jaxmoe.training.repeated.rows import advantages as advantages
from jaxmoe.training.repeated.rows import compared as compared
