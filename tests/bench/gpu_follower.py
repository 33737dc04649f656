#!/usr/bin/env python3
"""A module on a GPU that follows a run: the run's bits, whole versions in every stream, and how soon it has them.

    gpu_follower.py FOLDER [--device cuda] [--json FILE] [--rounds N] [--seconds S] [--tiny]

FOLDER holds bin/ballastd (`deploy/setup.sh portable`). Two parts:
  checks   a small transformer that follows a trainer's run, on a daemon on the GPU and on one on CPUs: after each step the trainer's
           bits; likewise weights whose elements do not lie in their order; in bf16 those of a follower on the CPU; a version
           that was named; a CUDA graph of the module, replayed; and threads, each with a stream of its own, whose forwards see
           the whole of one version while others come
  landing  a transformer in bf16: from when the trainer has a step's weights until the module has them, too, in N rounds, beside a
           copy of as many bytes from pinned memory
One JSON object a line. --tiny: a small model for the second part too, to try the program, with --device cpu without a GPU. Exit
code 77, and a line that says why, where torch, the client or a GPU is missing; 1 where a check failed.
"""

import json
import statistics
import sys
import threading
import time
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

from gpu_trainer import batches, check, loss_of, make_model, parse_options, synchronize
from gpu_training import daemon

STEPS = 10
LONG_S = 60.0
RUN = "followed"


class Trained:
    """A model on the device, a version of it with every step."""

    def __init__(self, server: str, model, rounding: str = "stochastic", **follow):
        import ballast

        self.model = model
        options = {"server": server, "run": RUN, "rounding": rounding, "follow": ballast.Follow(**follow)}
        self.optimizer = ballast.AdamW(model.named_parameters(), lr=1e-3, **options)
        self.steps = 0

    def step(self, loss) -> int:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.wait()
        self.steps += 1
        return self.steps

    def close(self):
        self.optimizer.close()


def emptied(model):
    """A copy whose weights are none that the run ever has."""
    import torch

    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.fill_(-7)
    return copy


def same(one, other) -> bool:
    import torch

    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def small_training(server: str, device: str, **options):
    """Of a small transformer, after its first step, with which the run begins; and a function that takes a step and returns which it was."""
    trained = Trained(server, make_model(128, 2, 512, device, "float32"), **options)
    batch = next(batches(512, 4, 64, device))
    trained.step(loss_of(trained.model, batch))
    return trained, lambda: trained.step(loss_of(trained.model, batch))


# --- checks -----------------------------------------------------------------------------------------------------------


def check_bits(server: str, device: str) -> bool:
    """Whether the module is the trainer's after each step, half of the time by its own forward."""
    import ballast

    trained, step = small_training(server, device)
    module, inputs = emptied(trained.model), next(batches(512, 1, 64, device))[0]
    with ballast.follow(module, server=server, run=RUN) as follower:
        for _ in range(STEPS):
            wanted = step()
            if wanted % 2 == 0:
                until = time.monotonic() + LONG_S
                while follower.step != wanted and time.monotonic() < until:
                    module(inputs)
            elif not follower.wait(step=wanted, timeout=LONG_S):
                return False
            if not same(module, trained.model):
                return False
    trained.close()
    return True


def check_layout(server: str, device: str) -> bool:
    """Whether weights that lie transposed, and ones of a channels_last layout, get the trainer's, too."""
    import ballast
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 5)).to(device)
    trained = Trained(server, model)
    module = emptied(model).to(memory_format=torch.channels_last)
    module[2].weight.data = module[2].weight.data.t().contiguous().t()
    image = torch.ones(2, 3, 8, 8, device=device)
    trained.step(model(image).square().mean())
    with ballast.follow(module, server=server, run=RUN) as follower:
        for _ in range(STEPS):
            wanted = trained.step(model(image).square().mean())
            if not follower.wait(step=wanted, timeout=LONG_S) or not same(module, model):
                return False
    trained.close()
    return not module[2].weight.is_contiguous()


def check_format(server: str, device: str) -> bool:
    """Whether a module in bf16 gets what one on the CPU gets."""
    import ballast
    import torch

    trained, step = small_training(server, device, formats=("bf16",))
    module = emptied(trained.model).to(torch.bfloat16)
    on_cpu = deepcopy(module).cpu()
    options = {"server": server, "run": RUN, "format": "bf16"}
    with ballast.follow(module, **options) as here, ballast.follow(on_cpu, **options) as there:
        for _ in range(STEPS):
            wanted = step()
            landed = all(follower.wait(step=wanted, timeout=LONG_S) for follower in (here, there))
            if not landed or not same(module, on_cpu):
                return False
    trained.close()
    return True


def check_named(server: str, device: str) -> bool:
    """Whether rollback() brings a named version back, and resume() the newest."""
    import ballast

    trained, step = small_training(server, device, tags=1)
    trained.optimizer.tag("first")
    first, module = deepcopy(trained.model), emptied(trained.model)
    newest = [step() for _ in range(STEPS)][-1]
    with ballast.follow(module, server=server, run=RUN) as follower:
        well = follower.wait(step=newest, timeout=LONG_S) and same(module, trained.model)
        well = well and follower.rollback("first", timeout=LONG_S) and same(module, first)
        follower.resume()
        well = well and follower.wait(step=newest, timeout=LONG_S) and same(module, trained.model)
    trained.close()
    return well


def check_graph(server: str, device: str) -> bool:
    """Whether a CUDA graph of the module computes with each newer version's weights."""
    import ballast
    import torch

    trained, step = small_training(server, device)
    module, inputs = emptied(trained.model), next(batches(512, 1, 64, device))[0]
    with torch.no_grad(), ballast.follow(module, server=server, run=RUN) as follower:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            module(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = module(inputs)
        before = torch.zeros_like(output)
        for _ in range(STEPS):
            with torch.enable_grad():
                wanted = step()
            if not follower.wait(step=wanted, timeout=LONG_S):
                return False
            with follower.held():
                graph.replay()
            # Products may be another kernel's in a graph; a step changes more.
            if not torch.allclose(output, module(inputs), 1e-4, 1e-4) or torch.allclose(output, before, 1e-4, 1e-4):
                return False
            before.copy_(output)
    trained.close()
    return True


def make_level(count: int, size: int):
    """A module of tensors whose elements are all equal at each step; a call returns the least and the largest of each."""
    import torch
    from torch import nn

    class Level(nn.Module):
        def __init__(self):
            super().__init__()
            self.tensors = nn.ParameterList(torch.zeros(size) for _ in range(count))

        def forward(self):
            return torch.stack([bound for tensor in self.tensors for bound in (tensor.amin(), tensor.amax())])

    return Level()


def check_streams(server: str, device: str, count: int = 8, size: int = 1 << 20) -> bool:
    """Whether forwards of several threads, each in a stream of its own, saw whole versions while the run went on."""
    import ballast
    import torch

    model = make_level(count, size).to(device)
    trained, module, seen, over = Trained(server, model, "nearest"), deepcopy(model), [], threading.Event()

    def compute():
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
        with stream, torch.no_grad():
            while not over.is_set():
                some = [module() for _ in range(3)]  # several are asked for before the first is done
                seen.extend(bounds.cpu() for bounds in some)

    trained.step(sum(tensor.sum() for tensor in model.tensors))
    with ballast.follow(module, server=server, run=RUN):
        threads = [threading.Thread(target=compute) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3 * STEPS):
            trained.step(sum(tensor.sum() for tensor in model.tensors))
        over.set()
        for thread in threads:
            thread.join()
    trained.close()
    values = {float(bounds[0]) for bounds in seen}
    return len(values) > 2 and all(bool((bounds == bounds[0]).all()) for bounds in seen)


def checks(ballastd: Path, device: str, out) -> bool:
    gpu = "cuda:0" if device == "cuda" else "cpu"
    parts = [
        ("a follower: the trainer's bits", gpu, check_bits),
        ("a follower, daemon on CPUs: the trainer's bits", "cpu", check_bits),
        ("a follower, weights of other layouts: the trainer's bits", gpu, check_layout),
        ("a follower in bf16: the bits of one on the CPU", gpu, check_format),
        ("a follower, a named version and back", gpu, check_named),
        ("a follower, forwards in streams of their own: whole versions", gpu, check_streams),
    ]
    if device == "cuda":
        parts.append(("a follower, a CUDA graph: the newest weights", gpu, check_graph))
    well = True
    for name, place, part in parts:
        row = {"check": name}
        try:
            with daemon(ballastd, place) as server:
                holds = part(server, device)
        except Exception as error:  # the others are to run too
            row["error"], holds = f"{type(error).__name__}: {error}", False
        well &= check(row, holds, out)
    return well


# --- landing ----------------------------------------------------------------------------------------------------------


def copy_seconds(model, device: str) -> float:
    """Of as many bytes as the model's weights from pinned memory."""
    import torch

    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    synchronize(device)
    began = time.perf_counter()
    there.copy_(here, non_blocking=True)
    synchronize(device)
    return time.perf_counter() - began


def quartiles(values: list[float]) -> list[float]:
    low, median, high = statistics.quantiles(values, n=4)
    return [low, median, high]


def time_landing(server: str, options) -> dict:
    """In milliseconds: low quartile, median, high quartile."""
    import ballast

    size = (64, 1, 512) if options.tiny else (1024, 12, 32768)
    trained = Trained(server, make_model(*size, options.device, "bfloat16"))
    module, batch = emptied(trained.model), next(batches(size[2], 1, 64, options.device))
    landed, copied, began = [], [], time.monotonic()
    trained.step(loss_of(trained.model, batch))
    with ballast.follow(module, server=server, run=RUN) as follower:
        for number in range(options.rounds + 1):
            wanted = trained.step(loss_of(trained.model, batch))
            since = time.perf_counter()
            if not follower.wait(step=wanted, timeout=LONG_S):
                raise RuntimeError(f"step {wanted} has not come within {LONG_S:.0f} s")
            if number > 0:  # the first one comes whole
                landed.append(1e3 * (time.perf_counter() - since))
                copied.append(1e3 * copy_seconds(module, options.device))
            if len(landed) >= 3 and time.monotonic() - began > options.seconds:
                break
    trained.close()
    row = {"landing": "newer weights", "bytes": sum(p.nbytes for p in module.parameters()), "rounds": len(landed)}
    return row | {"ms": quartiles(landed), "copy_ms": quartiles(copied)}


def main() -> int:
    options, ballastd = parse_options(__doc__, "--rounds", 15, 15)
    well = checks(ballastd, options.device, options.json)
    with daemon(ballastd, "cuda:0" if options.device == "cuda" else "cpu") as server:
        print(json.dumps(time_landing(server, options)), file=options.json, flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
