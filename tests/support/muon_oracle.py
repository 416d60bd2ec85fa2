# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Muon, MuonH and AdamH the dumbest way: numpy, float64, one matrix after the other.

`gradients` is one array per step; every function returns the weights after each of them. Only the
last two dimensions form a matrix.
"""

import numpy as np

ROWS = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def orthogonal(v):
    """Five polynomials of the singular values, by the singular value decomposition itself."""
    out, singular, right = np.linalg.svd(v, full_matrices=False)
    s = singular / (np.sqrt(np.sum(singular**2)) + 1e-8)
    for a, b, c in ROWS:
        s = a * s + b * s**3 + c * s**5
    return out @ np.diag(s) @ right


def _each(stack, function):
    flat = [function(matrix) for matrix in stack.reshape(-1, *stack.shape[-2:])]
    return np.stack(flat).reshape(stack.shape)


def muon_directions(gradients, momentum=0.95):
    """Parameters of the sum form with Nesterov, after every step."""
    buffer = np.zeros_like(gradients[0], dtype=np.float64)
    for gradient in gradients:
        buffer = momentum * buffer + gradient
        yield _each(gradient + momentum * buffer, orthogonal)


def adam_directions(gradients, beta1=0.9, beta2=0.95, epsilon=1e-8):
    """Adam's own, after every step."""
    first = second = np.zeros_like(gradients[0], dtype=np.float64)
    for t, gradient in enumerate(gradients, 1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        mean, square = first / (1 - beta1**t), second / (1 - beta2**t)
        yield mean / (np.sqrt(square) + epsilon)


def _sphere(weights, directions, rate, decay, spheres):
    """`spheres` lists the index of every set of matrices that share one."""
    weights = weights.astype(np.float64)
    radii = [np.linalg.norm(weights[where]) for where in spheres]
    for direction in directions:
        weights = weights.copy()
        for where, radius in zip(spheres, radii, strict=True):
            length = np.linalg.norm(direction[where])
            if length == 0.0 or radius == 0.0:
                continue
            moved = weights[where] * (1 - rate * decay)
            moved = moved - rate * radius * direction[where] / length
            weights[where] = moved * radius / np.linalg.norm(moved)
        yield weights


def spheres_of(shape, sphere):
    """Indices of what shares a sphere: each matrix, or all matrices of a layer."""
    batch = shape[:-2]
    return list(np.ndindex(*(batch if sphere == "matrix" else batch[:1])))


def muon(weights, gradients, *, rate, momentum=0.95, decay=0.0):
    """Sum form, Nesterov, scale sqrt(fan_out / fan_in)."""
    path, fan_in, fan_out = [], *weights.shape[-2:]
    weights = weights.astype(np.float64)
    for direction in muon_directions(gradients, momentum):
        step = np.sqrt(fan_out / fan_in) * direction + decay * weights
        weights = weights - rate * step
        path.append(weights)
    return path


def muonh(weights, gradients, *, rate, momentum=0.95, decay=0.0, sphere="matrix"):
    """Sum form, Nesterov."""
    directions = muon_directions(gradients, momentum)
    return list(_sphere(weights, directions, rate, decay, spheres_of(weights.shape, sphere)))


def adamh(
    weights, gradients, *, rate, beta1=0.9, beta2=0.95, epsilon=1e-8, decay=0.0, sphere="matrix"
):
    """Adam's direction on a sphere."""
    directions = adam_directions(gradients, beta1, beta2, epsilon)
    return list(_sphere(weights, directions, rate, decay, spheres_of(weights.shape, sphere)))
