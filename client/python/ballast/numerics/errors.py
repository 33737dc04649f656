"""What each format's rounding costs, as numbers. Used through ballast.numerics; tests/python measures them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CodecError:
    """What one encoding, rounded to nearest, changes.

    max_of_block: a bound on |decoded - x| over the largest |x| of the block that shares a scale. block: its length; 1:
        each element by itself, so a relative error; 0: a row or a tensor. For normal numbers: subnormals of a format
        lose more.
    nmse: sum (decoded - x)^2 / sum x^2 for x from N(0, 1), squared for the variance, in rows of 1024 and a tensor of 2^20.
        Measured, with 20 to 30 % of room.
    stochastic_nmse: the same where the format rounds stochastically; else nmse.
    """

    block: int
    max_of_block: float
    nmse: float
    stochastic_nmse: float


# Decoding is exact, so the error of a conversion is that of the format converted to.
CODEC_ERRORS: Mapping[tuple[str, str], CodecError] = {
    ("fp32", "weight"): CodecError(1, 0.0, 0.0, 0.0),
    ("split24", "weight"): CodecError(1, 2**-16, 5.6e-11, 5.6e-11),
    ("split32", "weight"): CodecError(1, 0.0, 0.0, 0.0),
    ("flash24", "weight"): CodecError(1, 1.55e-5, 5.7e-11, 5.7e-11),
    ("flash32", "weight"): CodecError(1, 1.2e-7, 1.3e-17, 1.3e-17),
    ("mcf", "weight"): CodecError(1, 2**-17, 7.3e-12, 7.3e-12),
    ("mcf8", "weight"): CodecError(1, 2**-8, 2.0e-6, 2.0e-6),
    ("bf16", "weight"): CodecError(1, 2**-8, 3.4e-6, 3.4e-6),
    ("fp16", "weight"): CodecError(1, 2**-11, 5.2e-8, 5.2e-8),
    ("fp8-e4m3", "weight"): CodecError(1, 2**-4, 8.5e-4, 8.5e-4),
    ("int8-row", "weight"): CodecError(0, 3.94e-3, 7.5e-5, 7.5e-5),
    ("int8-tensor", "weight"): CodecError(0, 3.94e-3, 1.6e-4, 1.6e-4),
    ("fp32", "momentum"): CodecError(1, 0.0, 0.0, 0.0),
    ("bf16", "momentum"): CodecError(1, 2**-8, 3.4e-6, 6.7e-6),
    ("companded8", "momentum"): CodecError(32, 8e-3, 3.3e-5, 6.9e-5),
    ("flash8", "momentum"): CodecError(32, 8.5e-3, 3.1e-5, 3.1e-5),
    ("dynamic8", "momentum"): CodecError(256, 7.1e-3, 1.5e-4, 1.5e-4),
    ("mcf", "momentum"): CodecError(1, 2**-8, 3.4e-6, 3.4e-6),
    ("fp32", "variance"): CodecError(1, 0.0, 0.0, 0.0),
    ("bf16", "variance"): CodecError(1, 2**-8, 3.4e-6, 6.7e-6),
    ("companded8", "variance"): CodecError(32, 4e-3, 1.3e-5, 2.5e-5),
    ("flash8", "variance"): CodecError(32, 5e-3, 1.1e-5, 1.1e-5),
    ("dynamic8", "variance"): CodecError(256, 3.6e-3, 5.0e-5, 5.0e-5),
    ("mcf", "variance"): CodecError(1, 2**-17, 7.3e-12, 7.3e-12),
}
