# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Code shared by ring_attention and token_ring_attention.

step            attention over one block while parcels travel between ranks
parcel          the record of what travels
half_blocks     the two unmasked half blocks of a zigzag layout
online_softmax  the state (out, lse) and its merge
checks          argument checks
remote_dma/     TPU kernels that send while they compute
"""
