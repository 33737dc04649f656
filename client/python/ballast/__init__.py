"""Ballast: an optimizer that lives on another device. See ballast.AdamW."""

from importlib.metadata import version

from ballast.errors import BallastError, Rejected, RunFenced, Unavailable
from ballast.optimizer import AdamW
from ballast.result import StepResult, StepTiming

__version__ = version("ballast-optim")

__all__ = ["AdamW", "BallastError", "Rejected", "RunFenced", "StepResult", "StepTiming", "Unavailable", "__version__"]
