#!/usr/bin/env python3
"""Draws deploy/data_flow.svg, the picture of the data flow in README.md.

data_flow.py [--check]     --check: writes nothing, exits 1 where the picture is not what this program draws
"""

import argparse
import sys
from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parent / "data_flow.svg"
WIDTH, HEIGHT = 900, 336

# Browsers follow the reader's theme, in a page as in an <img>.
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 15px }
  .small { font-size: 12px; fill: #57606a }
  .box { fill: #ffffff; stroke: #57606a; stroke-width: 1.2 }
  .behind { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1 }
  .part { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1 }
  .gradient { stroke: #9a6700; fill: none; stroke-width: 2.4 }
  .weight { stroke: #0969da; fill: none; stroke-width: 2.4 }
  .watch { stroke: #57606a; fill: none; stroke-width: 1.4; stroke-dasharray: 4 3 }
  .head-gradient { fill: #9a6700 } .head-weight { fill: #0969da } .head-watch { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 }
    .box { fill: #0d1117; stroke: #9198a1 } .behind, .part { fill: #161b22; stroke: #6e7681 }
    .gradient { stroke: #d29922 } .weight { stroke: #4493f8 } .watch { stroke: #9198a1 }
    .head-gradient { fill: #d29922 } .head-weight { fill: #4493f8 } .head-watch { fill: #9198a1 }
  }
"""


def box(x: int, y: int, width: int, height: int, style: str = "box") -> str:
    return f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'


def text(x: int, y: int, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def arrow(points: list[tuple[int, int]], kind: str) -> str:
    """Along straight lines; its head is at the last point."""
    line = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline class="{kind}" points="{line}" marker-end="url(#{kind})"/>'


def head(kind: str) -> str:
    return (
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="head-{kind}" d="M0,0 L8,4 L0,8 z"/></marker>'
    )


def part(x: int, y: int, width: int, title: str, detail: str) -> list[str]:
    middle = x + width // 2
    return [
        box(x, y, width, 52, "part"),
        text(middle, y + 22, title, anchor="middle"),
        text(middle, y + 40, detail, "small", "middle"),
    ]


def trainers() -> list[str]:
    """One in front of others: ranks of a run."""
    drawn = [box(34, 52, 228, 264, "behind"), box(27, 45, 228, 264, "behind"), box(20, 38, 228, 264)]
    drawn += [text(36, 64, "trainer, one a rank", "title"), text(36, 83, "your loop, your model", "small")]
    drawn += part(36, 98, 196, "backward", "a gradient lives for moments")
    drawn += part(36, 226, 196, "forward", "weights and activations")
    drawn.append(text(134, 184, "opt.step() returns when", "small", "middle"))
    drawn.append(text(134, 200, "every new weight is in place", "small", "middle"))
    return drawn


def daemon() -> list[str]:
    drawn = [box(430, 38, 300, 264), text(446, 64, "ballastd", "title")]
    drawn.append(text(446, 83, "on another GPU, or on CPUs: the same bits", "small"))
    drawn += part(446, 98, 268, "sum over ranks", "in rank order, whatever comes first")
    drawn += part(446, 162, 268, "one fused update a tensor", "AdamW, Lion, SGD, StableAdamW, ...")
    drawn += part(446, 226, 268, "master weights and moments", "5.125 bytes a parameter, snapshots")
    drawn += [arrow([(580, 150), (580, 161)], "watch"), arrow([(580, 214), (580, 225)], "watch")]
    return drawn


def between() -> list[str]:
    """The wire, and who watches."""
    drawn = [arrow([(232, 124), (445, 124)], "gradient"), arrow([(446, 252), (233, 252)], "weight")]
    for y, words in (
        (98, "gradients, as"),
        (114, "backward makes them"),
        (276, "new weights, while"),
        (292, "it goes on"),
    ):
        drawn.append(text(346, y, words, "small", "middle"))
    drawn.append(text(346, 184, "gRPC, or memory", "small", "middle"))
    drawn.append(text(346, 200, "shared on one host", "small", "middle"))
    for y, title, detail in (
        (124, "Prometheus", "alerts, dashboard"),
        (188, "live page", "nothing to install"),
        (252, "ballastctl", "plan, watch, explain"),
    ):
        drawn += [arrow([(730, y), (770, y)], "watch"), text(777, y - 2, title), text(777, y + 15, detail, "small")]
    return drawn


def draw() -> str:
    heads = "".join(head(kind) for kind in ("gradient", "weight", "watch"))
    parts = "\n".join([*trainers(), *daemon(), *between()])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">\n'
        f"<title>Trainers stream gradients to ballastd, which updates and streams weights back</title>\n"
        f"<style>{STYLE}</style>\n<defs>{heads}</defs>\n{parts}\n</svg>\n"
    )


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--check", action="store_true")
    if not flags.parse_args().check:
        PICTURE.write_text(draw())
        return 0
    if PICTURE.is_file() and PICTURE.read_text() == draw():
        return 0
    print(f"{PICTURE} is not what {Path(__file__).name} draws: run it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
