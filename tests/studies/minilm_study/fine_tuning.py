#!/usr/bin/env python3
"""Fine-tunes MiniLM with one optimizer, a step on request; study.py takes turns between several.

    fine_tuning.py ARM --seed N [--server ADDRESS] [--pairs N] [--longest N] [--text FILE]

The first line printed is {"parameters": N}, or {"absent": "why"} where the optimizer does not run here. Then each line
of standard input is answered by a line: `step` by {"step_s": ..., "loss": ...}, `evaluate` by {"held_out": ...}, `tell`
by {"peak": bytes resident at most, "planned": what the daemon planned by kind, if there is one}; or by `error ...`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "e2e")]  # memory.py is the end-to-end tests'

import arms  # noqa: E402
import encoder  # noqa: E402
import torch  # noqa: E402
import verses  # noqa: E402
from memory import status_bytes  # noqa: E402

KINDS = ("weights", "momentum", "variance", "gradients", "staging", "snapshots", "client_state")


class FineTuning:
    def __init__(self, options: argparse.Namespace):
        torch.set_num_threads(1)
        self._longest, self._pairs = options.longest, options.pairs
        self._random = torch.Generator().manual_seed(options.seed)
        pieces = verses.WordPieces(verses.file_of_wheel("vocab.txt"))
        self._verses = verses.Verses(options.text.read_text("utf-8"), pieces)
        self._model = encoder.load(verses.file_of_wheel("model.safetensors"))
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._remote = arms.arm_named(options.arm).remote
        self._optimizer: Any = arms.arm_named(options.arm).make(self._model, options.server)

    def step(self) -> dict[str, float]:
        """Forward, backward and update; the batch is drawn before the clock starts."""
        batch = self._verses.draw(self._pairs, self._random, self._longest)
        started = time.perf_counter()
        loss = verses.loss_of(self._model, batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"step_s": time.perf_counter() - started, "loss": loss.item()}

    def evaluate(self) -> dict[str, float]:
        return {"held_out": verses.held_out_loss(self._model, self._verses, self._longest)}

    def tell(self) -> dict[str, Any]:
        told: dict[str, Any] = {"peak": status_bytes(os.getpid(), "VmHWM")}
        if self._remote:
            planned = self._optimizer.run_status().plan.server
            told["planned"] = {kind: getattr(planned, kind) for kind in KINDS}
        return told


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=[arm.name for arm in arms.ARMS])
    parser.add_argument("--seed", type=int, required=True, help="of the batches")
    parser.add_argument("--server", default="", help="the daemon's address")
    parser.add_argument("--pairs", type=int, default=16, help="of a batch")
    parser.add_argument("--longest", type=int, default=verses.LONGEST, help="tokens of a verse")
    parser.add_argument("--text", type=Path, required=True)
    return parser.parse_args()


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def main() -> None:
    options = parse_options()
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        tuning = FineTuning(options)
    except Exception as error:  # whatever an optimizer raises: the table says it
        print(json.dumps({"absent": said(error)}), file=answers, flush=True)
        return
    print(json.dumps({"parameters": tuning.parameters}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = json.dumps(getattr(tuning, line.strip())())
        except Exception as error:  # likewise
            answer = f"error {said(error)}"
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
