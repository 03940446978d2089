"""How far an honest answer may be from the float64 oracle: one table for every backend, with its reasoning.

Let u be the unit roundoff of the element type: 2^-24, 2^-11 and 2^-8 for float32, float16 and bfloat16.

* 16-bit types. Inputs are exact in the type, scores and softmax are float32 by contract. Two roundings are
  left: of the softmax weights before the product with the values, and of the result; each is at most u
  relative to the row, and a third u covers a result that is rounded once more when parts are merged. 3u.
* float32. Weights and result are not rounded further; what remains is the accumulation of scores. A dot
  product of E terms in any order is off by at most about sqrt(E) u |q||k|, with E up to 576 and scores up to
  about 16 here: 24 * 16 * 2^-24 = 2.3e-5. TensorFloat-32 inputs (u = 2^-11) are outside, as they should be.
* lse. Scores' errors enter absolutely: the same 2.3e-5 for float32. In 16 bits a kernel may sum the rounded
  weights, which is off by at most u relatively, so u absolutely in the logarithm; the float32 part is added.

* Quantised caches. The oracle reads the cache's own bytes, decoded to float32 by its layout, so their error
  is not in question. A kernel that computes in 16 bits may round the decoded rows once more: u for each key
  element, which moves scores of standard deviation SPREAD by about SPREAD u.

Errors are measured per row against the row's norm, and never against less than the mean row's: a row whose
values cancel is not held to more digits than its inputs have. Every tolerance must be small enough to notice
the deliberate faults in `catalogue.CONTROLS`; each numeric check is run with them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SPREAD", "TOLERANCES", "Tolerance", "tolerance"]

# Standard deviation of the scores in all checks that do not say otherwise: softmax is then neither flat nor a
# single spike.
SPREAD = 3.0


@dataclass(frozen=True)
class Tolerance:
    """Bounds for one element type: of a row relative to its norm, and of lse in absolute terms."""

    row: float
    lse: float


_SCORES = 24 * 16 * 2.0**-24
_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

TOLERANCES = {
    "float32": Tolerance(row=_SCORES, lse=_SCORES),
    "float16": Tolerance(row=3 * _ROUNDOFF["float16"], lse=_ROUNDOFF["float16"] + _SCORES),
    "bfloat16": Tolerance(row=3 * _ROUNDOFF["bfloat16"], lse=_ROUNDOFF["bfloat16"] + _SCORES),
}


def tolerance(dtype: str, *, quantised: bool = False, spread: float = SPREAD) -> Tolerance:
    """The bounds for kernels of a dtype, over a cache of rows that it may have to round, at a spread of the
    scores.
    """
    more = max(spread / SPREAD - 1, 0) * _SCORES + (spread * _ROUNDOFF[dtype] if quantised else 0)
    exact = TOLERANCES[dtype]
    return Tolerance(exact.row + more, exact.lse + more)
