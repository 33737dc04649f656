#!/usr/bin/env python3
"""Layers in 8 bits (ballast.nn) on a GPU: their products, a training through the daemon, and their speed beside bf16's.

    gpu_layers.py FOLDER [--device cuda] [--json FILE] [--seconds S] [--rounds N] [--tiny]

FOLDER holds bin/ballastd (`deploy/setup.sh portable`). Three parts:
  products  int8's against sums of integers; what is done in one pass on a GPU against the CPU's bits; a layer's output
            and gradients against those of the same layer on the CPU: of int8 the first two to the bit
  trainings a small transformer whose layers compute in the codes that the daemon serves, on a daemon on the GPU and on one on
            CPUs: the same losses to the bit, one byte a parameter, and at the end the daemon's weights
  speed     forward and backward of one linear layer, width to 4 * width, in bf16: nn.Linear and each layer of ballast.nn, as it
            is and under torch.compile, in turns, by CUDA events
One JSON object a line. --tiny: small layers for the third part too, none compiled, to try the program, with --device cpu
without a GPU. Exit code 77, and a line that says why, where torch, the client or a GPU is missing; 1 where a check failed.
"""

import json
import math
import sys
import time
from pathlib import Path

from gpu_trainer import batches, check, deterministic, loss_of, make_model, parse_options, run_id, synchronize
from gpu_training import daemon

STEPS = 20
# Of Float8Linear against the CPU's: a GPU's tensor cores add products of fp8 in fewer bits than fp32 has.
FP8_ERROR = 2e-3


def layers() -> dict:
    """By what they are called here: class and options."""
    from ballast import nn

    return {
        "SwitchBack": (nn.SwitchBackLinear, {}),
        "SwitchBack M": (nn.SwitchBackLinear, {"variant": "m"}),
        "SwitchBack Q": (nn.SwitchBackLinear, {"variant": "q"}),
        "fp8, a scale a tensor": (nn.Float8Linear, {}),
        "fp8, no scale": (nn.Float8Linear, {"scale": None}),
    }


SERVED = ("SwitchBack", "SwitchBack Q", "fp8, no scale")

# --- products ---------------------------------------------------------------------------------------------------------


def random(*shape: int, seed: int):
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers_agree(device: str) -> bool:
    import torch
    from ballast.nn import int8

    generator = torch.Generator().manual_seed(1)
    for m, k, n in ((1, 8, 8), (31, 1024, 48), (33, 1032, 8), (200, 5000, 264)):
        a, b = (torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator) for shape in ((m, k), (n, k)))
        a[0], b[0] = 127, -127
        got = int8.matmul(a.to(device), b.to(device).t()).cpu()
        if not torch.equal(got.double(), int8.reference(a, b.t()).float().double()):
            return False
    return True


def operations(x, factors, weight, device: str) -> dict[str, list]:
    """What of a layer is to be the same to the bit on every device, of these fp32 matrices, by what it is called."""
    import torch
    from ballast import served_codes
    from ballast.nn import float8, fused, int8

    x, factors, weight = x.to(device), factors.to(device), weight.to(device)
    made, largest = int8.quantize_rows(x)
    codes = served_codes.encode(weight, "int8-row")
    found = {
        "codes of rows": [made, largest, *int8.quantize_rows(x, factors)],
        "codes of rows, bf16": list(int8.quantize_rows(x.bfloat16(), factors)),
        "transposed": [fused.transposed(made).contiguous()],
        "product": [int8.product(made, codes.codes, largest, codes.scales, factors[: len(weight)], torch.float32)],
        "product, bf16": [int8.product(made, codes.codes, largest, None, None, torch.bfloat16)],
    }
    for name in served_codes.CODES:
        served = served_codes.encode(weight, name)
        found[name] = [served.codes, served.scales, served.decode(torch.float32), served.decode(torch.bfloat16)]
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for scaled in (False, True):
            found[f"{dtype}, {scaled}"] = list(float8.to_fp8(1000 * x, dtype, scaled))
    return {name: [t.cpu().contiguous().view(torch.uint8) for t in tensors] for name, tensors in found.items()}


def check_operations(device: str, out) -> bool:
    import torch

    well = True
    for rows, columns in ((1, 16), (100, 528), (129, 1024), (300, 9000)):
        x, factors, weight = random(rows, columns, seed=1), random(columns, seed=2).abs(), random(8, columns, seed=3)
        x[-1, 0] = 0
        wanted, got = operations(x, factors, weight, "cpu"), operations(x, factors, weight, device)
        other = [name for name in wanted if not all(map(torch.equal, wanted[name], got[name]))]
        row = {"check": f"operations on {rows} x {columns}: the CPU's bits", "error": ", ".join(other)}
        well &= check(row, not other, out)
    return well


def passed_through(layer, x, gradient) -> list:
    """Output, and the gradients of input, weight and bias; in fp64, on the CPU."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(gradient)
    return [t.detach().double().cpu() for t in (output, x.grad, layer.weight.grad, layer.bias.grad)]


def relative(got, wanted) -> float:
    return float((got - wanted).norm() / wanted.norm())


def check_layer(name: str, dtype: str, device: str, out) -> bool:
    """On the device against the CPU."""
    import torch

    torch.manual_seed(0)
    layer_type, options = layers()[name]
    kind = getattr(torch, dtype)
    here = layer_type(528, 272, dtype=kind, **options)
    x, gradient = random(100, 528, seed=1).to(kind), random(100, 272, seed=2).to(kind)
    wanted = passed_through(here, x, gradient)
    got = passed_through(here.to(device), x.to(device), gradient.to(device))
    errors = [relative(one, other) for one, other in zip(got, wanted)]
    to_the_bit = 0 if name.startswith("SwitchBack") else FP8_ERROR
    of_weight = FP8_ERROR if dtype == "float32" else 4e-3
    holds = (
        max(errors[:2]) <= to_the_bit + (2e-3 if to_the_bit and dtype != "float32" else 0)
        and max(errors[2:]) <= of_weight
    )
    row = {"check": f"{name}, {dtype}: as on the CPU", "errors": errors}
    return check(row, holds, out)


def check_products(device: str, out) -> bool:
    well = check({"check": "int8: sums of integers"}, integers_agree(device), out)
    well &= check_operations(device, out)
    for name in layers():
        for dtype in ("float32", "bfloat16"):
            well &= check_layer(name, dtype, device, out)
    return well


# --- trainings --------------------------------------------------------------------------------------------------------


def bytes_of_weights(model) -> tuple[int, int]:
    """What the switched layers' weights take, and their number."""
    from ballast.nn import CodedLinear

    held = elements = 0
    for layer in model.modules():
        if isinstance(layer, CodedLinear):
            codes = layer.weight_codes()
            held += codes.codes.numel() + 4 * codes.scales.numel() + layer.weight.untyped_storage().nbytes()
            elements += layer.weight.numel()
    return held, elements


def train(server: str, name: str, device: str) -> tuple[list[float], dict]:
    """The losses, and what is to be seen of the model at the end."""
    import ballast
    import torch

    model = make_model(128, 2, 512, device, "bfloat16")
    layer_type, options = layers()[name]
    ballast.nn.switch(model, ["*.qkv", "*.out", "*.up", "*.down"], layer_type, **options)
    opt = ballast.AdamW(
        model.named_parameters(),
        lr=1e-3,
        server=server,
        run=run_id(name.replace(",", "")),
        formats=ballast.nn.served_formats(model),
    )
    batch, losses = next(batches(512, 4, 64, device)), []
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        losses.append(loss.item())
    opt.wait()
    held, elements = bytes_of_weights(model)
    mine = {key: value.clone() for key, value in model.state_dict().items()}
    opt.pull()
    differing = sum(not torch.equal(value, mine[key]) for key, value in model.state_dict().items())
    return losses, {"bytes_a_parameter": held / elements, "differing": differing, "last_loss": losses[-1]}


def check_trainings(ballastd: Path, device: str, out) -> bool:
    well, gpu = True, "cuda:0" if device == "cuda" else "cpu"
    for name in SERVED:
        found = []
        for place in (gpu, "cpu"):
            with daemon(ballastd, place) as server:
                losses, seen = train(server, name, device)
            falls = math.isfinite(losses[-1]) and losses[-1] < losses[0]
            holds = falls and seen["differing"] == 0 and seen["bytes_a_parameter"] < 1.05
            well &= check({"check": f"{name}, served by a daemon on {place}"} | seen, holds, out)
            found.append(losses)
        well &= check({"check": f"{name}: both daemons give the same losses"}, found[0] == found[1], out)
    return well


# --- speed ------------------------------------------------------------------------------------------------------------


def time_once(layer, x, gradient, device: str) -> float:
    """Milliseconds."""
    import torch

    if device != "cuda":
        began = time.perf_counter()
        layer(x).backward(gradient)
        return 1e3 * (time.perf_counter() - began)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    layer(x).backward(gradient)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def give_codes(layer) -> None:
    """As from the first step on: the weight is what the daemon served."""
    if layer.code_format:
        codes = layer.weight_codes()
        layer._codes.take(layer.weight, codes)


COMPILED = ("SwitchBack", "fp8, a scale a tensor", "fp8, no scale")


def sides(width: int, options) -> dict:
    """By what they are called: the layers that are timed."""
    import torch

    device = options.device
    made = {"nn.Linear": torch.nn.Linear(width, 4 * width, device=device, dtype=torch.bfloat16)}
    for name, (layer_type, variant) in layers().items():
        made[name] = layer_type(width, 4 * width, device=device, dtype=torch.bfloat16, **variant)
        give_codes(made[name])
    if options.tiny:
        return made
    return made | {f"{name}, compiled": torch.compile(made[name], dynamic=False) for name in COMPILED}


def time_width(width: int, tokens: int, options, out) -> None:
    import torch

    made = sides(width, options)
    x = torch.randn(tokens, width, device=options.device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, 4 * width, device=options.device, dtype=torch.bfloat16)
    taken: dict[str, list[float]] = {name: [] for name in made}
    for name, layer in list(made.items()):
        try:
            for _ in range(3):
                time_once(layer, x, gradient, options.device)
        except Exception as error:  # the others are to be timed
            print(
                json.dumps({"layer": name, "width": width, "skipped": f"{type(error).__name__}: {error}"[:300]}),
                file=out,
            )
            del made[name], taken[name]
    for _ in range(options.rounds):
        for name, layer in made.items():
            synchronize(options.device)
            taken[name].append(time_once(layer, x, gradient, options.device))
    peers = taken["nn.Linear"]
    for name, times in taken.items():
        ratios = sorted(peer / own for peer, own in zip(peers, times))
        at = [ratios[round(share * (len(ratios) - 1))] for share in (0.25, 0.5, 0.75)]
        row = {"layer": name, "width": width, "tokens": tokens, "ms": sorted(times)[len(times) // 2], "speed": at}
        print(json.dumps(row | {"rounds": len(times)}), file=out, flush=True)


def time_all(options, out) -> None:
    import torch

    began = time.monotonic()
    for width in (1024, 2048, 4096) if not options.tiny else (32,):
        if time.monotonic() - began > options.seconds:
            print(json.dumps({"layer": "all", "width": width, "skipped": "no time left"}), file=out, flush=True)
            continue
        torch.compiler.reset()  # so many compiled layers, of one forward(), as there may be
        time_width(width, 16384 if not options.tiny else 64, options, out)
        if options.device == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    options, ballastd = parse_options(__doc__, "--rounds", 15, 60)
    with deterministic():
        well = check_products(options.device, options.json)
        well &= check_trainings(ballastd, options.device, options.json)
    time_all(options, options.json)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
