"""Division by a number, rounded once."""

from __future__ import annotations

from fractions import Fraction

import torch

from mla_core.quant.division import divide


def numbers() -> torch.Tensor:
    return torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 100


def is_nearest(quotient: float, x: float, by: float) -> bool:
    """Is no neighbouring float32 closer to x / by?"""
    around = [torch.nextafter(torch.tensor(quotient), torch.tensor(far)).item() for far in (-1e38, 1e38)]
    exact = Fraction(x) / Fraction(by)
    return all(abs(Fraction(quotient) - exact) <= abs(Fraction(other) - exact) for other in around)


def test_every_quotient_is_the_nearest_float32():
    x = numbers()
    pairs = zip(divide(x, 448.0).tolist(), x.tolist(), strict=True)
    assert all(is_nearest(quotient, value, 448.0) for quotient, value in pairs)


def test_multiplying_by_the_inverse_would_be_noticed():
    x = numbers()
    inverse = torch.tensor(1.0) / torch.tensor(448.0)
    pairs = zip((x * inverse).tolist(), x.tolist(), strict=True)
    assert not all(is_nearest(quotient, value, 448.0) for quotient, value in pairs)
