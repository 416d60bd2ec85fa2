# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""How attention spreads the positions of a sequence over devices: the union of choices."""

from sharding.sequence_parallel.none import NoSequenceParallelConfig as NoSequenceParallelConfig
from sharding.sequence_parallel.none import attend_whole_sequences as attend_whole_sequences

SequenceParallelConfig = NoSequenceParallelConfig
