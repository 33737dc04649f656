"""Arrays in the formats: encoding, decoding, and memory as the kernels need it. Used through ballast.numerics."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ballast._core import numerics as _native
from ballast.numerics import tables
from ballast.numerics.errors import CODEC_ERRORS, CodecError
from ballast.numerics.tables import Format

Array = NDArray[Any]
ROUNDINGS = ("nearest", "stochastic")


# --- memory ---------------------------------------------------------------------------------------------------------


def aligned_zeros(dtype: str, count: int) -> Array:
    """`count` zeros at an address that 64 divides."""
    size = np.dtype(dtype).itemsize * count
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype)


def address_of(array: Array) -> int:
    return int(array.__array_interface__["data"][0]) if array.size else 0


def padded_count(n: int) -> int:
    pad = int(tables.registry()["pad"])
    return -(-n // pad) * pad


def flat_input(name: str, values: Any, dtype: str = "float32") -> Array:
    """`values` flat, aligned and of `dtype`, copied only where they are not. A float64 is not narrowed silently."""
    array = np.asarray(values)
    if array.dtype != np.dtype(dtype):
        raise ValueError(f"{name} has dtype {array.dtype}: wanted {dtype}")
    flat = array.reshape(-1)
    if address_of(flat) % 64 == 0 and flat.flags.c_contiguous:
        return flat
    copy = aligned_zeros(dtype, flat.size)
    copy[:] = flat
    return copy


@dataclass(frozen=True, eq=False)
class Encoded:
    """An array in one of the formats.

    planes: numpy arrays by name, flat, padded to 256 elements and aligned to 64 bytes; step() updates them in place.
    Their dtypes are those of formats(): codes int8 or uint8, halves of a weight uint16 (bf16, as bits), int8 or int16,
    scales uint16 (bf16, as bits), float16 or float32. A served format has "codes", unpadded, and "scales".
    """

    format: str
    slot: str
    shape: tuple[int, ...]
    planes: Mapping[str, Array]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all planes, padding included."""
        return sum(plane.nbytes for plane in self.planes.values())

    @property
    def served(self) -> bool:
        """Whether the format is a wire format's: it decodes, and takes no steps."""
        return tables.format_of(self.format, self.slot).kind == "wire"

    def copy(self) -> Encoded:
        """The same in memory of its own."""
        planes = {}
        for name, plane in self.planes.items():
            planes[name] = aligned_zeros(plane.dtype.str, plane.size).reshape(plane.shape)
            planes[name][...] = plane
        return Encoded(self.format, self.slot, self.shape, planes)


def empty(form: Format, slot: str, shape: tuple[int, ...]) -> Encoded:
    padded = padded_count(math.prod(shape))
    planes = {plane.name: aligned_zeros(plane.dtype, padded // plane.per) for plane in form.planes[slot]}
    return Encoded(form.name, slot, shape, planes)


def plane_addresses(encoded: Encoded, form: Format) -> list[int]:
    """Where the planes are, in the registry's order; ValueError if one is not as the kernels need it."""
    padded = padded_count(encoded.size)
    found = []
    for plane in form.planes[encoded.slot]:
        array = encoded.planes.get(plane.name)
        if array is None or array.dtype != np.dtype(plane.dtype) or array.shape != (padded // plane.per,):
            raise ValueError(
                f"{form.name}: plane {plane.name!r} is to be {plane.dtype}[{padded // plane.per}]: see from_planes()"
            )
        if not array.flags.c_contiguous or address_of(array) % 64:
            raise ValueError(f"{form.name}: plane {plane.name!r} is not aligned to 64 bytes: see from_planes()")
        found.append(address_of(array))
    return found


def from_planes(format: str, slot: str, shape: tuple[int, ...], planes: Mapping[str, Array]) -> Encoded:
    """Codes made elsewhere (a checkpoint, FlashOptim, bitsandbytes) as an Encoded, copied.

    planes: by the names and of the dtypes of formats(); as long as the shape asks for, or padded to 256 elements.
    ValueError if a plane is missing, has another dtype or length, or decodes to a value that is not finite (split24 and
    split32: an upper half of +-0 with a negative rest is no weight).
    """
    form = tables.format_of(format, slot)
    if form.kind == "wire":
        raise ValueError(f"{format} is a wire format: it has no padded planes")
    encoded = empty(form, slot, tuple(shape))
    for plane in form.planes[slot]:
        if plane.name not in planes:
            raise ValueError(f"{format}: plane {plane.name!r} is missing: wanted {', '.join(encoded.planes)}")
        given, target = np.asarray(planes[plane.name]).reshape(-1), encoded.planes[plane.name]
        lengths = (-(-encoded.size // plane.per), target.size)
        if given.dtype != target.dtype or given.size not in lengths:
            wanted = f"{plane.dtype}[{lengths[0]}] or [{lengths[1]}]"
            raise ValueError(f"{format}: plane {plane.name!r} is {given.dtype}[{given.size}]: wanted {wanted}")
        target[: given.size] = given
    if not np.isfinite(decode(encoded)).all():
        raise ValueError(f"{format}: the planes hold a value that is not finite")
    return encoded


# --- codecs ---------------------------------------------------------------------------------------------------------


def encode(x: Any, format: str, slot: str = "weight", rounding: str = "nearest", key: int = 0) -> Encoded:
    """Encodes an fp32 array of any shape.

    format: of a weight, a master or a served format; of a "momentum" or "variance" (v itself, not its root), a state
        format. int8-row has one scale for each index of all axes but the last; an array of one axis is one row.
    rounding: "nearest", or "stochastic" for moments: unbiased in the decoded value, with the random bits that an update
        of random key `key` would use. Formats without it (fp32, flash8, dynamic8, mcf) round to nearest either way.
    Returns an Encoded of x's shape. ValueError: an unknown name, a dtype that is not float32, an element that is not
    finite or beyond what the format holds, a negative variance.
    """
    form = tables.format_of(format, slot)
    check_choice("rounding", rounding, ROUNDINGS)
    values = flat_input("x", x)
    shape = tuple(np.shape(x))
    if slot == "weight":
        if rounding == "stochastic":
            raise ValueError("rounding: a weight is loaded to nearest; it is rounded stochastically by step() alone")
        return load_weights(form, values, shape) if form.kind == "master" else _serve(form, values, shape)
    encoded = empty(form, slot, shape)
    stochastic, addresses = rounding == "stochastic", plane_addresses(encoded, form)
    is_variance = slot == "variance"
    if not _native.encode_slot(
        form.index, is_variance, addresses, address_of(values), values.size, check_integer("key", key, 0), stochastic
    ):
        raise ValueError(why_refused(slot, values, form.largest[slot]))
    return encoded


def check_choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{name} is {value!r}: wanted {' or '.join(map(repr, valid))}")


def check_integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 2**64:
        raise ValueError(f"{name} is {value!r}: wanted an integer from {least} to 2^64 - 1")
    return int(value)


def why_refused(name: str, values: Array, largest: float) -> str:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        return f"{name}: element {bad[0]} is {values[bad[0]]}, not finite"
    if name == "variance" and values.min() < 0:
        return f"{name}: element {values.argmin()} is {values.min()}: a variance is not negative"
    return f"{name}: element {np.abs(values).argmax()} is {np.abs(values).max()}: this format holds up to {largest}"


def load_weights(form: Format, values: Array, shape: tuple[int, ...]) -> Encoded:
    encoded = empty(form, "weight", shape)
    fp32 = tables.wires()["fp32"].index
    if not _native.load(form.index, plane_addresses(encoded, form), fp32, address_of(values), values.size):
        raise ValueError(why_refused("weight", values, math.inf))
    return encoded


def _serve(form: Format, values: Array, shape: tuple[int, ...]) -> Encoded:
    """Through an fp32 master, as the daemon serves it."""
    if not form.serving:
        raise ValueError(f"{form.name} is a format of gradients alone: step(grad_format=...) decodes it")
    master = tables.masters()["fp32"]
    loaded = load_weights(master, values, shape)
    addresses = plane_addresses(loaded, master)
    leading = shape[:-1] if form.scaling == "row" and shape[-1:] != (1,) else ()  # (n, 1) is one row
    rows = math.prod(leading)
    length = values.size // max(1, rows)
    scales = aligned_zeros("float32", 0 if form.scaling == "none" else rows)
    for row in range(scales.size):
        scales[row] = _native.absmax(master.index, addresses, row * length, (row + 1) * length)
    codes = aligned_zeros(form.planes["weight"][0].dtype, padded_count(values.size))
    if values.size:
        _native.serve(master.index, addresses, form.index, address_of(scales), length, address_of(codes), values.size)
    planes = {"codes": codes[: values.size].reshape(shape)}
    if form.scaling != "none":
        planes["scales"] = scales.reshape(leading) if form.scaling == "row" else scales
    return Encoded(form.name, "weight", shape, planes)


def decode(encoded: Encoded) -> NDArray[np.float32]:
    """The values as fp32, in the array's shape. Exact: it is encoding that rounds."""
    form = tables.format_of(encoded.format, encoded.slot)
    if form.kind == "wire":
        return _decode_served(encoded)
    values, n = aligned_zeros("float32", padded_count(encoded.size)), encoded.size
    addresses = plane_addresses(encoded, form)
    if form.kind == "master":
        _native.serve(form.index, addresses, tables.wires()["fp32"].index, 0, max(n, 1), address_of(values), n)
    else:
        _native.decode_slot(form.index, encoded.slot == "variance", addresses, address_of(values), n)
    return values[:n].reshape(encoded.shape)


def _decode_served(encoded: Encoded) -> NDArray[np.float32]:
    codes = encoded.planes["codes"]
    if encoded.format.startswith("int8"):
        scales = encoded.planes["scales"].ravel()
        each = np.repeat(scales, codes.size // max(1, scales.size)).reshape(codes.shape)
        return np.asarray(codes * each / np.float32(127), np.float32)  # in a trainer's order: its bits
    if encoded.format == "fp8-e4m3":
        return _e4m3_values()[codes]
    return codes.astype(np.float32)  # fp16


@functools.cache
def _e4m3_values() -> NDArray[np.float32]:
    """The value of each byte: sign, 4 bits of exponent with bias 7, 3 of mantissa; S.1111.111 is NaN (OCP)."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    magnitude[byte & 127 == 127] = np.nan
    return (magnitude * np.where(byte > 127, -1, 1)).astype(np.float32)


def convert(encoded: Encoded, to: str) -> Encoded:
    """The same array in another format of its slot: decoded, and encoded to nearest; in its own as it is.

    What that changes is said by conversion_error(encoded.format, to, encoded.slot). ValueError as encode()'s.
    """
    return encoded.copy() if to == encoded.format else encode(decode(encoded), to, encoded.slot)


def conversion_error(source: str, to: str, slot: str) -> CodecError:
    """How far convert() moves values: what encoding in `to` costs, since decoding is exact. What was decoded from a format
    and is encoded in it again stays as it is, but in flash32 for the last bit, in mcf and dynamic8, and in moments of companded8
    and flash8: a block whose largest code was not reached gets another scale, and code 0 of companded8's variance, which stands
    for a quarter of code 1, becomes that. The daemon finds such codes again when it loads moments.

    ValueError for an unknown name.
    """
    for name in (source, to):
        tables.format_of(name, slot)
    return CODEC_ERRORS[to, slot]
