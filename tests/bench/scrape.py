#!/usr/bin/env python3
"""What a scrape costs where the daemon has much to tell: 16 runs of 20,000 tensors together, in 64 layers each, one of
which trains while it is scraped.

    scrape.py [--quick] [--json FILE]

Seconds from the request to the last byte of /metrics, over loopback. The bounds: 50 ms, and 12,500 series,
since no run is written to a disk.
"""

import json
import statistics
import threading
import time

import torch
import trainer
from comparison import noise

import ballast

RUNS, TENSORS, ELEMENTS = 16, 20_000, 64
BOUND_MS, MOST_SERIES = 50, 12_500


class Run:
    def __init__(self, number: int, server: str):
        self.parameters = {
            f"layers.{i % 64}.w{i}": torch.nn.Parameter(torch.zeros(ELEMENTS)) for i in range(TENSORS // RUNS)
        }
        self.optimizer = ballast.AdamW(self.parameters.items(), lr=1e-3, server=server, run=f"run-{number}")

    def step(self):
        sum(parameter.sum() for parameter in self.parameters.values()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def scrape(daemon) -> tuple[float, str]:
    started = time.perf_counter()
    status, text = daemon.get("/metrics")
    took = time.perf_counter() - started
    assert status == 200, text
    return took, text


def measure(scrapes: int) -> tuple[list[float], int, int]:
    torch.set_num_threads(1)
    with trainer.own_daemon() as daemon:
        runs = [Run(number, daemon.server) for number in range(RUNS)]
        for run in runs:
            run.step()
        over, steps, took = threading.Event(), 0, []

        def train():
            nonlocal steps
            while not over.is_set():
                runs[0].step()
                steps += 1

        training = threading.Thread(target=train)
        training.start()
        try:
            while len(took) < scrapes or steps < 2:
                seconds, text = scrape(daemon)
                took.append(seconds)
        finally:
            over.set()
            training.join()
        for run in runs:
            run.optimizer.close()
    series = sum(1 for line in text.splitlines() if line.startswith("ballast_"))
    return took, series, steps


def main():
    options = trainer.parse_options(__doc__, quick="few scrapes")
    took, series, steps = measure(10 if options.quick else 100)
    low, middle, high = (1000 * value for value in trainer.quartiles(took))
    print(f"{RUNS} runs, {TENSORS} tensors, {series} series of at most {MOST_SERIES}; {steps} steps meanwhile")
    print(
        f"a scrape: {middle:.1f} ms ({low:.1f} to {high:.1f}), the longest {1000 * max(took):.1f}; bound {BOUND_MS} ms"
    )
    if options.json:
        row = {"name": "a scrape: 16 runs, 20,000 tensors", "value": 1000 * statistics.median(took), "unit": "ms"}
        options.json.write_text(
            json.dumps([row | {"bound": BOUND_MS, "ratio": middle / BOUND_MS, "n": len(took), "noise": noise(took)}])
        )


if __name__ == "__main__":
    main()
