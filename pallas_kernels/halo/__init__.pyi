# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from pallas_kernels.halo.products import project as project
from pallas_kernels.halo.products import project_groups as project_groups
from pallas_kernels.halo.weights import EncodedWeight as EncodedWeight
from pallas_kernels.halo.weights import Halo as Halo
from pallas_kernels.halo.weights import encode as encode
