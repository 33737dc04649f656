"""The daemon's arithmetic on numpy arrays: its formats, its optimizers, its bits. Needs no daemon and no torch.

Everything here runs the kernels that the daemon runs, so the same inputs, hyperparameters, key and step give the same
bits on every machine. For studying a format, importing and exporting state, and testing.

    from ballast import numerics

    m = numerics.encode(moments, "companded8", slot="momentum", rounding="stochastic", key=1)
    m.planes["momentum"], m.planes["momentum.scale"]                # int8 codes, bf16 scales as uint16
    numerics.decode(m)                                              # fp32, in the array's shape
    numerics.convert(m, "flash8")                                   # FlashOptim's codes of the same moments
    done = numerics.step("adamw", weights, gradient, hyper={"lr": 1e-3})
    done = numerics.step("adamw", done.weight, gradient, done.state, {"lr": 1e-3}, t=2)

Formats of weights: fp32, split24 and split32 (bf16 and a rest; integers of the fp32 pattern), flash24 and flash32
(FlashOptim), mcf (Collage, arXiv 2405.03637) and mcf8 (the same of fp8), bf16. Of moments: fp32, bf16, companded8 (8
bits, a scale for 32), flash8 (FlashOptim), dynamic8 (bitsandbytes, arXiv 2110.02861), mcf. Served: fp32, bf16, fp16,
fp8-e4m3, int8-row and int8-tensor (SwitchBack, arXiv 2304.13013). formats(), rules() and kernels() list them as compiled.
"""

from __future__ import annotations

from ballast._core import numerics as _native
from ballast.numerics import tables
from ballast.numerics.codecs import Encoded, conversion_error, convert, decode, encode, from_planes
from ballast.numerics.errors import CODEC_ERRORS, CodecError
from ballast.numerics.steps import Statistics, Step, new_state, step
from ballast.numerics.tables import Format, Hyper, Kernel, Plane, Rule

__all__ = [
    "CODEC_ERRORS",
    "CodecError",
    "Encoded",
    "Format",
    "Hyper",
    "Kernel",
    "Plane",
    "Rule",
    "Statistics",
    "Step",
    "conversion_error",
    "convert",
    "decode",
    "encode",
    "formats",
    "from_planes",
    "kernels",
    "isa",
    "new_state",
    "rules",
    "step",
    "tensor_key",
]


def isa() -> str:
    """The instructions in use, the widest of this processor: "scalar", "avx2" or "avx512". The bits are the same."""
    return str(tables.registry()["isa"])


def formats() -> tuple[Format, ...]:
    """Every master, state and wire format, with its planes and its bytes a parameter."""
    return (*tables.masters().values(), *tables.states().values(), *tables.wires().values())


def rules() -> dict[str, Rule]:
    """Every optimizer by name, with its hyperparameters' defaults and ranges."""
    return dict(tables.rules())


def kernels() -> tuple[Kernel, ...]:
    """Every compiled (rule, master, state), with its bytes a parameter."""
    return tables.kernels()


def tensor_key(name: str, seed: int = 0) -> int:
    """The key of a tensor's random bits in a run of this seed: xxh3_64(name, seed). For step(key=...)."""
    return _native.tensor_key(name, seed)
