"""python -m ballast.convert: see --help."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from ballast.convert.formats import ALONE, FORMATS, are_keys
from ballast.errors import Rejected

EPILOG = """\
formats:
  torch         a file of torch.save: optimizer.state_dict(), alone or inside a larger checkpoint (see --part)
  safetensors   one file; only such that this program wrote are read, for others have no param_groups
  dcp           a folder of torch.distributed.checkpoint, as FSDP, Accelerate and Trainer under FSDP save; goes by names
  hf-trainer    a folder of Hugging Face's Trainer: optimizer.pt and the model's files
  flashoptim    a file of torch.save with FlashOptim's 8-bit moments, as compress_state_dict=True saves; master weights,
                where there are any, in 24 bits beside the bf16 model that --names gives
  bitsandbytes  a file of torch.save with the 8-bit state of bitsandbytes' AdamW8bit and others; made of all tensors with
                4096 elements or more, embeddings too

What IN is, is found out. Each format can be converted to each. To an 8-bit format, moments are rounded; all else is
exact. A folder of Trainer's is copied with its other files; from elsewhere, OUT has optimizer.pt and the weights alone.

names:
  Files of torch.save number an optimizer's parameters, folders of torch.distributed.checkpoint name them. --names gives
  the names. Of a model saved by torch.save, their order is the optimizer's if it has one param_group; if it has more,
  it is found by shapes where these leave no doubt. safetensors files sort their names, so of a model in this format
  only weights are taken. In all other cases give a text file, one name a line, group after group:
    names = {id(p): name for name, p in model.named_parameters()}
    lines = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    pathlib.Path("names.txt").write_text("\\n".join(lines))

examples:
  python -m ballast.convert checkpoint-500 adamw8.pt --to bitsandbytes --verify
  python -m ballast.convert optimizer.pt optimizer_0 --to dcp --names pytorch_model.bin
  python -m ballast.convert last.ckpt optimizer.safetensors --to safetensors --part optimizer_states.0

exit status: 0 done; 1 IN is not as needed, the disk is full, or --verify found a difference: there is no OUT then;
2 the command line is wrong; 130 interrupted.
"""


def _keys(text: str) -> str:
    if not are_keys(text):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted keys joined by dots, as app.optim")
    return text


def parser() -> argparse.ArgumentParser:
    """The command line's."""
    made = argparse.ArgumentParser(
        prog="python -m ballast.convert",
        description="Converts an optimizer's state from one format to another, a tensor at a time, without a daemon.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("source", metavar="IN", help="file or folder to read; it is not changed")
    add("out", metavar="OUT", help="file or folder to make: all of it or none")
    add("--to", required=True, choices=FORMATS, metavar="FORMAT", help=f"what OUT is to be: {', '.join(FORMATS)}")
    add(
        "--from", dest="source_format", choices=FORMATS, metavar="FORMAT", help="what IN is to be: refused if it is not"
    )
    add("--verify", action="store_true", help="read OUT again and compare it with IN, slot by slot")
    add(
        "--names",
        action="append",
        default=[],
        metavar="MODEL_STATE",
        help="the model, or a .txt of names; may be repeated",
    )
    add("--part", metavar="KEYS", help="where in IN the optimizer is, as keys joined by dots, if it has more than one")
    add(
        "--out-part",
        type=_keys,
        default="optimizer",
        metavar="KEYS",
        help="where in a dcp folder it is put (default: %(default)s)",
    )
    add("--state1", choices=ALONE, metavar="SLOT", help=f"what bitsandbytes' only state is: {', '.join(ALONE)}")
    add("--drop", action="append", default=[], metavar="SLOT", help="leave a slot out, as master; may be repeated")
    add("--overwrite", action="store_true", help="replace an OUT that exists")
    add("--quiet", action="store_true", help="say nothing of progress")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    options = vars(parser().parse_args(arguments))
    quiet = options.pop("quiet")
    try:
        from ballast.convert.conversion import convert  # torch

        report = convert(**options, progress=None if quiet else sys.stderr)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("ballast.convert needs torch 2.4 or later: pip install torch (or ballast-optim[torch])", file=sys.stderr)
        return 1
    except Rejected as error:
        print(f"ballast.convert: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ballast.convert: {error.filename or options['out']}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ballast.convert: interrupted; there is no OUT", file=sys.stderr)
        return 130
    print(
        f"{options['out']}: {report.parameters} parameters, {report.nbytes / 2**20:.1f} MiB of state, from "
        f"{report.source} ({report.system}'s) to {options['to']}"
    )
    for slot in report.errors or ():
        print(f"verified {slot}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is half done is deleted then too
    sys.exit(main())
