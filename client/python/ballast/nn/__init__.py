"""Layers that compute in 8 bits, and use the weights that the daemon serves as they come.

    ballast.nn.switch(model, "blocks.*")                            # nn.Linear becomes SwitchBackLinear, by name
    optimizer = ballast.AdamW(model.named_parameters(), run="my-run",
                              formats=ballast.nn.served_formats(model))   # their weights are served in int8

From the first step on such a layer holds one byte a parameter, and no weight in another dtype.
"""

from ballast.nn.coded_linear import CodedLinear, served_formats
from ballast.nn.float8 import Float8Linear
from ballast.nn.layer_scale import LayerScale
from ballast.nn.switchback import SwitchBackLinear
from ballast.nn.switching import switch
from ballast.nn.unit_scaling import UnitScaledFloat8Linear, fp8_losses

__all__ = [
    "CodedLinear",
    "Float8Linear",
    "LayerScale",
    "SwitchBackLinear",
    "UnitScaledFloat8Linear",
    "fp8_losses",
    "served_formats",
    "switch",
]
