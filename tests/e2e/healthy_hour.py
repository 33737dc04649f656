"""An hour in which all goes well: no shipped alert may fire.

    healthy_hour.py [MINUTES]

The shipped rules, as they are, over trainings of the four small models of tests/studies/spike_study, about a step a second: by
two ranks with a journal, by one that clips over all tensors, by one with snapshots, and short ones that finish, one after the
other. Now and then each stops for an evaluation. Prints what there was; fails if an alert has fired, if only once.
"""

import concurrent.futures
import sys
import tempfile
import threading
from pathlib import Path

import torch
from daemon import ROOT, Daemon
from monitoring import Prometheus, missing_programs

import ballast

sys.path.insert(0, str(ROOT / "tests" / "studies" / "spike_study"))

import tasks  # noqa: E402

PAUSE_S = 1.0  # between steps
EVALUATE_EVERY, EVALUATION_S = 600, 90
SHORT_STEPS = 200
RANKS = {"text": 2, "image": 1, "caption": 1}  # of the runs that last the hour, which have their tasks' names
OPTIONS = {
    "text": {"durability": "journal", "checkpoint_every_seconds": 120},
    "image": {"max_grad_norm": 1.0, "checkpoint_every_seconds": 300},
    # At the learning rate of the study, 2e-3, its loss spikes by itself at step 925.
    "caption": {"snapshots": 2, "snapshot_every": 100, "lr": 5e-4},
}

drawing, failed = threading.Lock(), threading.Event()


def make_model(task: str) -> torch.nn.Module:
    """torch draws all models from one generator."""
    with drawing:
        return tasks.TASKS[task].model(seed=1)


def train(server: str, run: str, task: str, steps: int, rank: int = 0, world: int = 1, **options) -> int:
    """The steps that were made: fewer where another training has failed."""
    of, random = tasks.TASKS[task], torch.Generator().manual_seed(rank)
    model = make_model(task)
    options = {"lr": of.lr, "server": server, "run": run, "rank": rank, "world": world} | options
    with ballast.AdamW(model.named_parameters(), **options) as optimizer:
        for step in range(1, steps + 1):
            loss = model.loss(of.draw(random, of.size, "usual"))
            loss.backward()
            optimizer.step(loss=loss)
            optimizer.zero_grad()
            if failed.wait(PAUSE_S if step % EVALUATE_EVERY else EVALUATION_S):
                break
    return step


def train_for(minutes: float, server: str) -> tuple[int, int]:
    """Runs and steps, of each rank."""
    steps = round(60 * minutes / (PAUSE_S + EVALUATION_S / EVALUATE_EVERY))
    for task in tasks.TASKS.values():
        task.held_out()  # reads the data, once for all threads
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lasting = [
            pool.submit(train, server, run, run, steps, rank, world, **OPTIONS[run])
            for run, world in RANKS.items()
            for rank in range(world)
        ]
        for future in lasting:
            future.add_done_callback(lambda ended: failed.set() if ended.exception() else None)
        short = []
        try:
            while not any(future.done() for future in lasting):
                short.append(train(server, f"short-{len(short)}", "convolution", min(steps, SHORT_STEPS)))
        except BaseException:
            failed.set()
            raise
        return len(RANKS) + len(short), sum(future.result() for future in lasting) + sum(short)


def main() -> None:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    torch.set_num_threads(1)
    if missing := missing_programs():
        return print(f"NOT RUN: not installed: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="ballast-hour-") as name:
        folder = Path(name)
        storage = folder / "storage"
        storage.mkdir()
        with Daemon(folder, "--storage.dir", str(storage), "--max_runs", "64") as daemon, Prometheus(
            folder, daemon.ops, None
        ) as prometheus:
            runs, steps = train_for(minutes, daemon.server)
            fired = prometheus.query(f'count_over_time(ALERTS{{alertstate="firing"}}[{round(2 * minutes) + 1}m])')
    for series in fired:
        print({name: value for name, value in series["metric"].items() if name in ("alertname", "run_id", "layer")})
    print(f"{len(fired)} alerts fired in {minutes:g} minutes, {runs} runs and {steps} steps")
    sys.exit(bool(fired))


if __name__ == "__main__":
    main()
