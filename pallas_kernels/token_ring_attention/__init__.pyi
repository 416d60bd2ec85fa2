# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from pallas_kernels.token_ring_attention.api import token_ring_attention as token_ring_attention
