# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.training.policy_gradient.advantages import answer_weights as answer_weights
from jaxmoe.training.policy_gradient.advantages import group_advantages as group_advantages
from jaxmoe.training.policy_gradient.advantages import k3 as k3
from jaxmoe.training.policy_gradient.objective import ADVANTAGES as ADVANTAGES
from jaxmoe.training.policy_gradient.objective import OLD as OLD
from jaxmoe.training.policy_gradient.objective import REFERENCE as REFERENCE
from jaxmoe.training.policy_gradient.objective import SAMPLER_WEIGHTS as SAMPLER_WEIGHTS
from jaxmoe.training.policy_gradient.objective import PolicyGradientConfig as PolicyGradientConfig
