"""The names of formats and slots that the command line and convert() take."""

from __future__ import annotations

FORMATS = ("torch", "safetensors", "dcp", "hf-trainer", "flashoptim", "bitsandbytes")
SYSTEMS = ("flashoptim", "bitsandbytes")  # files of torch.save with the state of these in 8 bits
FOLDERS = ("dcp", "hf-trainer")
# What bitsandbytes' state1 may be where there is no state2: Lion's, SGD's and LARS', RMSprop's, Adagrad's.
ALONE = ("exp_avg", "momentum_buffer", "square_avg", "sum")


def are_keys(text: str) -> bool:
    """Whether it is keys joined by dots."""
    return all(text.split("."))
