"""What alerts are for, done on purpose: SERVER, and "stays" or "goes". The one that stays prints "calm" and waits for a line
before it does harm. Each prints "ready" once all is so, and waits for its input's end. The two share the run "pair"; the test kills the one that goes.
"""

import sys

import torch

import ballast

STEPS = 3


def make(server: str, run: str, elements: int = 8, **options) -> tuple[torch.nn.Parameter, ballast.Optimizer]:
    weight = torch.nn.Parameter(torch.ones(elements))
    options = {"lr": 1e-3, "server": server, "run": run} | options
    return weight, ballast.AdamW([("w", weight)], **options)


def step(weight: torch.nn.Parameter, optimizer: ballast.Optimizer, factor: float = 1, loss: float = 1) -> None:
    (factor * weight.square().sum()).backward()
    optimizer.step(loss=loss)
    optimizer.zero_grad()


def train(server: str, run: str, steps: int = STEPS, **options) -> tuple[torch.nn.Parameter, ballast.Optimizer]:
    made = make(server, run, **options)
    for _ in range(steps):
        step(*made)
    return made


def stay(server: str) -> list:
    stalled, loss, gradient = (train(server, run) for run in ("stalled", "loss", "gradient"))
    skips = train(server, "skips", nonfinite="skip_step")
    policy = train(server, "policy", 80, spikes=ballast.Spikes(warmup_steps=20, action="skip"))
    kept = [train(server, "idle"), train(server, "pair", rank=0, world=2)]
    train(server, "finished")[1].close()
    say("calm")  # counters are scraped before they are raised
    sys.stdin.readline()
    stalled[0].square().sum().backward()  # and no step()
    step(*loss, loss=float("nan"))
    step(*gradient, factor=float("inf"))
    for _ in range(2 * STEPS):
        step(*skips, factor=float("inf"))
    step(*policy, factor=1e6)
    try:
        train(server, "huge", elements=64 << 20)
    except ballast.Rejected as refused:
        say(str(refused).partition(" ")[0])
    return [stalled, loss, gradient, skips, policy, *kept]


def say(word: str) -> None:
    print(word, flush=True)


def main() -> None:
    server, what = sys.argv[1:]
    torch.set_num_threads(1)
    kept = stay(server) if what == "stays" else [train(server, "lost"), train(server, "pair", rank=1, world=2)]
    say("ready")
    sys.stdin.read()
    del kept


if __name__ == "__main__":
    main()
