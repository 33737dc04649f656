"""Ballast: an optimizer that lives on another device. See ballast.AdamW."""

from importlib.metadata import version

from ballast.errors import BallastError, Rejected, RunFenced, Unavailable

try:
    from ballast.optimizer import AdamW
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("ballast needs torch 2.2 or later: pip install torch (or ballast-optim[torch])") from error
from ballast.result import StepResult, StepTiming

__version__ = version("ballast-optim")

__all__ = ["AdamW", "BallastError", "Rejected", "RunFenced", "StepResult", "StepTiming", "Unavailable", "__version__"]
