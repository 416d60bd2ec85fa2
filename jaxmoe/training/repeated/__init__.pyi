# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.training.repeated.rows import Rows as Rows
from jaxmoe.training.repeated.rows import advantages as advantages
from jaxmoe.training.repeated.rows import check_repeated as check_repeated
from jaxmoe.training.repeated.rows import compared as compared
from jaxmoe.training.repeated.rows import num_passes as num_passes
