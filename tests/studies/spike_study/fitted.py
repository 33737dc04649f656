"""All signs together: a logistic regression from a step's signs to whether a loss spike begins in one to eight steps, fitted
to the tasks that the detector was tuned on."""

from __future__ import annotations

import numpy as np
import torch
from cells import WARM_UP
from detectors import Trace, by_layer, signs
from score import LEAD, loss_spikes
from tasks import TUNED

NAME = ("all signs, a fitted sum", "logistic regression")
MOST = 20.0  # spreads: beyond, more is no more of a sign


def inputs(run: dict) -> np.ndarray:
    """(steps, signs), all finite."""
    trace = Trace.of(run)
    found = np.stack(list(signs(trace, by_layer(trace)).values()), 1)
    return np.clip(np.nan_to_num(found, nan=0.0), -MOST, MOST)


def outcomes(run: dict) -> tuple[np.ndarray, np.ndarray]:
    """Whether a spike is near, and whether the step counts: not in the warm-up, nor while a spike goes on."""
    steps = np.arange(1, len(run["losses"]) + 1)
    near, counts = np.zeros(len(steps)), steps > WARM_UP
    for first, known in loss_spikes(run):
        near[(steps >= first - LEAD) & (steps < first)] = 1
        counts &= (steps < first) | (steps > known)
    return near, counts


def series(runs: list[dict]) -> list[np.ndarray]:
    """By run: the regression's verdict at each step, as log odds."""
    all_inputs = [inputs(run) for run in runs]
    learned_from = [(seen, *outcomes(run)) for seen, run in zip(all_inputs, runs) if run["cell"]["task"] in TUNED]
    x = torch.tensor(np.concatenate([seen[counts] for seen, _, counts in learned_from]))
    y = torch.tensor(np.concatenate([near[counts] for _, near, counts in learned_from]))
    weight, bias = fit(x, y)
    return [seen @ weight.numpy() + float(bias) for seen in all_inputs]


def fit(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.zeros(x.shape[1], dtype=x.dtype, requires_grad=True)
    bias = torch.zeros((), dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(x @ weight + bias, y)
        (loss + 1e-4 * weight.square().sum()).backward()
        return loss

    optimizer.step(closure)
    return weight.detach(), bias.detach()
