"""Other ways to foretell a loss spike, tried on what the daemon measured: each makes of a run's trace one number a step, and
an event is where that number crosses a threshold.

A detector sees the past alone: step t is compared with the 128 before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from cells import WARM_UP

WINDOW, LEAST = 128, 64  # as in the daemon
MERGED, REARM = 10, 0.9  # likewise: steps between events; the share of the threshold below which it may be crossed anew
OF_NORMAL = 1.4826
LEAST_SPREAD = 1e-2  # of a logarithm
FLOORS, PERSISTENCE, AGREEMENT = (0, 1.5, 2.3), (1, 2, 4), (1, 2, 3)

# By step, the first axis; NaN: nothing can be said.
Series = np.ndarray


@dataclass(frozen=True)
class Trace:
    """What the daemon measured in one training, by step."""

    rms: Series  # (steps, layers), of the layers that are watched
    curvature: Series  # of the layer where it is largest
    grad_norm: Series
    loss: Series

    @classmethod
    def of(cls, run: dict) -> Trace:
        columns = {name: [step[name] for step in run["measured"]] for name in run["measured"][0]}
        rms = np.array(columns["layer_rms"], float)
        watched = np.isfinite(rms).any(0)
        curvature, grad_norm, loss = (
            np.array(columns[name], float) for name in ("curvature_ratio", "grad_norm", "loss")
        )
        # It is measured now and then, and is what it was until then.
        measured = np.maximum.accumulate(np.where(np.isfinite(curvature), np.arange(len(curvature)), 0))
        return cls(rms[:, watched], curvature[measured], grad_norm, loss)


def windows(values: Series) -> np.ndarray:
    """The 128 values before each step, as the last axis, for the steps that have 64 before them; NaN: fewer than 128."""
    before = np.concatenate([np.full((WINDOW, *values.shape[1:]), np.nan), values[:-1]])
    return np.lib.stride_tricks.sliding_window_view(before, WINDOW, axis=0)[LEAST:]


def beside_windows(values: Series, made: np.ndarray) -> Series:
    return np.concatenate([np.full((LEAST, *values.shape[1:]), np.nan), made])


def over_median(values: Series) -> Series:
    """How many spreads each lies above the median of those before it."""
    seen = windows(values)
    median = np.nanmedian(seen, -1)
    spread = OF_NORMAL * np.nanmedian(np.abs(seen - median[..., None]), -1)
    return beside_windows(values, (values[LEAST:] - median) / np.maximum(spread, LEAST_SPREAD))


def over_largest(values: Series) -> Series:
    return beside_windows(values, values[LEAST:] / np.nanmax(windows(values), -1))


def persistent(series: Series, steps: int) -> Series:
    """The least of the last so many: high where all of them are."""
    behind = [np.concatenate([np.full(shift, np.nan), series[: len(series) - shift]]) for shift in range(steps)]
    return np.min(behind, 0)


def agreed(by_layer: Series, layers: int) -> Series:
    """The largest of the layers, or the second, or the third: high where so many are."""
    known = np.sort(np.nan_to_num(by_layer, nan=-np.inf), 1)
    return known[:, -min(layers, known.shape[1])]


def by_layer(trace: Trace) -> dict[str, Series]:
    return {
        "RMS_t / its largest": over_largest(trace.rms),
        "log RMS_t": over_median(np.log(np.maximum(trace.rms, 1e-6))),
    }


def signs(trace: Trace, layered: dict[str, Series]) -> dict[str, Series]:
    """One number a step, `layered` being by_layer's; but the loss and RMS_t itself, logarithms in spreads above their median."""
    made = {name: agreed(values, 1) for name, values in layered.items()}
    made["RMS_t"] = agreed(trace.rms, 1)
    made["curvature"] = trace.curvature
    made["log curvature"] = over_median(np.log(np.maximum(made["curvature"], 1e-6)))
    made["log gradient norm"] = over_median(np.log(trace.grad_norm))
    made["loss"] = over_median(trace.loss)
    return made


def detectors(trace: Trace) -> Iterator[tuple[str, str, Series]]:
    """(family, variant, series); the higher, the more of a sign."""
    layered = by_layer(trace)
    single = signs(trace, layered)
    of_rms, of_norm = single["log RMS_t"], single["log gradient norm"]
    for family, values in layered.items():
        del single[family]
        for floor, steps, layers in itertools.product(FLOORS, PERSISTENCE, AGREEMENT):
            high = persistent(agreed(np.where(trace.rms >= floor, values, -np.inf), layers), steps)
            yield family, f"RMS_t of {floor:g}, {steps} steps, {layers} layers", high
    single["log RMS_t and log gradient norm"] = np.minimum(of_rms, of_norm)
    single["log RMS_t or log gradient norm"] = np.maximum(of_rms, of_norm)
    for (family, values), steps in itertools.product(single.items(), PERSISTENCE):
        yield family, f"{steps} steps", persistent(values, steps)


def crossings(series: Series, threshold: float) -> list[int]:
    """The steps of the events, counted from 1; as server/stability/spike_detector.cc has them."""
    events: list[int] = []
    high = False
    rearmed = min(threshold, REARM * threshold)
    for place in np.flatnonzero((series >= threshold) | (series < rearmed)):
        step = int(place) + 1
        if high and series[place] < rearmed:
            high = False
        elif not high and series[place] >= threshold:
            high = True
            if step > WARM_UP and (not events or step - events[-1] >= MERGED):
                events.append(step)
    return events
