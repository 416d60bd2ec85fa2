# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers of /v1/embeddings: hidden states of the tokens of each text as one vector.

They are the states behind the final norm, from which the model draws the next token: that of the
last token, or the mean of all, by `pooling_type`. Vectors have unit length unless `normalize` is
false.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from jaxmoe.serve.answers import Ended, Generated
from jaxmoe.serve.http.asked import Asked
from jaxmoe.serve.http.errors import HTTPError
from jaxmoe.serve.http.streams import Answers, failure, is_failed


async def embed(answers: Answers, request: Asked) -> dict[str, Any]:
    """Return the object of the embeddings of all texts.

    Args:
        answers: Events of the answers, each of one token.
        request: The request.

    Raises:
        HTTPError: A text was refused, or the server gives no hidden states.
    """
    vectors: list[Any] = [None] * len(request.prompts)
    async for number, event in answers:
        if isinstance(event, Generated):
            vectors[number] = event.embedding
        elif isinstance(event, Ended) and is_failed(event):
            answers.cancel()
            raise failure(event)
    if any(vector is None for vector in vectors):
        raise HTTPError(
            400,
            "this server gives no hidden states: serve a model that writes from left to right",
            code="unsupported_route",
        )
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, request)}
        for index, vector in enumerate(vectors)
    ]
    count = sum(map(len, request.prompts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": request.model, "usage": usage}


def _written(vector: np.ndarray, request: Asked) -> Any:
    """Return a vector as numbers, or as the base64 of little-endian float32."""
    length = max(float(np.linalg.norm(vector)), 1e-12) if request.is_normalized else 1.0
    values = (vector / length).astype("<f4")
    return base64.b64encode(values.tobytes()).decode() if request.is_packed else values.tolist()
