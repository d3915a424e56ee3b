"""A canary: what the trainer's model says about a fixed text, for whoever loads the weights to compare with. Pure.

Digests show that the bytes are right; this shows that they are in the right places of the right model, in a sound dtype.
Refuses to tell two policies apart that differ by a few optimiser steps: that is what digests are for.
"""

import math
from collections.abc import Sequence

from echo.weights.manifest import Canary

_TOKENS = 32
# Mean absolute difference of logprobs, in nats, between two sound computations: other kernels, other order of sums, and weights
# that the trainer holds in float32. A layer in the wrong place is off by whole nats.
TOLERANCE = {"float32": 0.02, "float16": 0.05, "bfloat16": 0.25}


def token_ids(vocabulary: int, positions: int | None) -> tuple[int, ...]:
    """The fixed text: tokens from all over a vocabulary, the same for every model of that size; at least 2."""
    count = max(2, min(_TOKENS, positions or _TOKENS))
    # Steps of the golden ratio spread evenly, whatever the size.
    return tuple(int((0.5 + index * 0.6180339887498949) % 1.0 * vocabulary) for index in range(count))


def problem(canary: Canary, measured: Sequence[float], dtype: str) -> str | None:
    """Why `measured`, of an engine that computes in `dtype`, can't be of the same policy; None where it may.

    measured: natural logs of the probabilities of the tokens after the first, at temperature 1.
    """
    if len(measured) != len(canary.logprobs):
        return f"{len(measured)} logprobs of the canary instead of {len(canary.logprobs)}"
    differences = [abs(found - told) for found, told in zip(measured, canary.logprobs, strict=True)]
    mean = math.fsum(differences) / len(differences)
    if not mean <= TOLERANCE[dtype]:
        return (
            f"its canary differs from the trainer's by {mean:.3g} nats a token ({TOLERANCE[dtype]:g} are allowed in {dtype}): "
            "are both sides of the same model and versions?"
        )
    return None
