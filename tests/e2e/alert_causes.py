"""What alerts are for, done on purpose: SERVER, and "stays" or "goes". The one that stays prints "calm" and waits for a line
before it does harm. Each prints "ready" once all is so, and waits for its input's end. The two share the run "pair"; the test
kills the one that goes.
"""

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator

import torch

import ballast

STEPS = 3
CALM_STEPS = 150  # after which whatever is watched has a past
OUTLIERS = 3  # of the gradient's norm, each a few steps after the one before
SPIKES = 21  # of which none is foretold
FORETOLD = 4  # jumps of the gradient, with a spike after each but the last
FEW = 400  # steps between them: so they are outliers of the norm too seldom for an alert
PAUSE_S = 0.1  # of those that train all the while

Made = tuple[torch.nn.Parameter, ballast.Optimizer]


def make(server: str, run: str, shape: tuple[int, ...] = (8,), **options) -> Made:
    weight = torch.nn.Parameter(torch.ones(shape))
    options = {"lr": 1e-3, "server": server, "run": run} | options
    return weight, ballast.AdamW([("w", weight)], **options)


def step(made: Made, factor: float = 1, loss: float = 1) -> None:
    weight, optimizer = made
    (factor * weight.square().sum()).backward()
    optimizer.step(loss=loss)
    optimizer.zero_grad()


def train(server: str, run: str, steps: int = STEPS, **options) -> Made:
    made = make(server, run, **options)
    for _ in range(steps):
        step(made)
    return made


@contextlib.contextmanager
def training(*all_made: tuple[Made, float]) -> Iterator[None]:
    """Trains these, each with its pause between steps."""
    over = threading.Event()

    def go_on(made: Made, pause_s: float) -> None:
        while not over.wait(pause_s):
            step(made)

    threads = [threading.Thread(target=go_on, args=each, daemon=True) for each in all_made]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def straggling(server: str) -> list[tuple[Made, float]]:
    """Two ranks, of which one takes long."""
    return [(make(server, "straggling", rank=rank, world=2), (PAUSE_S, 10 * PAUSE_S)[rank]) for rank in range(2)]


def jump_often(made: Made) -> None:
    for _ in range(OUTLIERS):
        for factor in (1e3, 1, 1):
            step(made, factor=factor)


def spike_unforetold(made: Made) -> None:
    """One gradient that is an outlier, and spikes long after it, each more than four times as high as the one before."""
    step(made, factor=1e3)
    for number in range(SPIKES):
        for loss in 15 * [1.0] + [1 + 5.0**number]:
            step(made, loss=loss)


def spike_foretold(made: Made) -> None:
    """Gradients jump, and three steps later the loss does; but for the last time."""
    for time in range(1, FORETOLD + 1):
        step(made, factor=30)
        if time < FORETOLD:
            for loss in [1.0, 1.0, 2.0] + FEW * [1.0]:
                step(made, loss=loss)


def stop_itself(made: Made) -> None:
    """Gradients that are not finite take the run back, until it may go back no more."""
    while True:
        try:
            step(made, factor=float("inf"))
        except ballast.RunRewound:
            made[1].zero_grad()
        except ballast.BallastError as error:
            return say(f"stopped: {error}".partition(":")[0])


def fill(server: str) -> list[Made]:
    """Runs, until the daemon's memory has room for no more."""
    kept, numbers = [], itertools.count()
    for elements in (1 << shift for shift in range(26, 16, -1)):
        with contextlib.suppress(ballast.Rejected):
            while True:
                made = make(server, f"full-{next(numbers)}", (elements,))
                made[1].connect()
                kept.append(made)
    return kept


def stay(server: str) -> None:
    spikes = ballast.Spikes(warmup_steps=20, action="skip")
    rewind = ballast.Spikes(action="rewind", act_on=("nonfinite",), rewind_steps=1, max_rewinds=1)
    kept = [train(server, "idle"), train(server, "pair", rank=0, world=2)]
    stalled, loss, gradient = (train(server, run) for run in ("stalled", "loss", "gradient"))
    skips = train(server, "skips", nonfinite="skip_step")
    policy = train(server, "policy", 80, spikes=spikes)
    stopped = train(server, "stopped", spikes=rewind, snapshots=2, snapshot_every=1)
    outliers, chance = (train(server, run, CALM_STEPS) for run in ("outliers", "chance"))
    foretold = train(server, "foretold", CALM_STEPS, shape=(64, 64))
    healthy = make(server, "healthy", (64, 64))
    rounded = make(server, "rounded", lr=1e-7, master="bf16", rounding="nearest")
    train(server, "finished")[1].close()
    with training((healthy, PAUSE_S), (rounded, PAUSE_S), *straggling(server)):
        say("calm")  # counters are scraped before they are raised
        sys.stdin.readline()
        stalled[0].square().sum().backward()  # and no step()
        step(loss, loss=float("nan"))
        step(gradient, factor=float("inf"))
        for _ in range(2 * STEPS):
            step(skips, factor=float("inf"))
        step(policy, factor=1e6)
        stop_itself(stopped)
        jump_often(outliers)
        spike_unforetold(chance)
        spike_foretold(foretold)
        kept += fill(server)
        say("ready")
        sys.stdin.read()


def go(server: str) -> None:
    kept = [train(server, "lost"), train(server, "pair", rank=1, world=2)]
    say("ready")
    sys.stdin.read()
    del kept


def say(word: str) -> None:
    print(word, flush=True)


def main() -> None:
    server, what = sys.argv[1:]
    torch.set_num_threads(1)
    {"stays": stay, "goes": go}[what](server)


if __name__ == "__main__":
    main()
