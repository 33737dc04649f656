"""What cpu_kernels.py measured, as a table and as rows for collect.py."""

import datetime
import os
import platform
import re
from pathlib import Path

from turns import Variant, kept, quartiles


def seconds(variant: Variant) -> tuple[float, float, float]:
    return quartiles([variant.seconds[i] for i in kept(variant)[0]])


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    isas = [name for name, flag in (("AVX2", "avx2"), ("AVX-512", "avx512f")) if re.search(rf"\b{flag}\b", text)]
    return f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores, {' and '.join(isas) or 'no AVX2'}"


class Report:
    def __init__(self, variants: dict[str, Variant], ratios: list[dict], about: dict):
        self.variants, self.about = variants, about
        self.ratios = [row | {"cells": self.cells(row)} for row in ratios]

    # --- ratios ---

    def cells(self, row: dict) -> dict[str, dict]:
        return {level: self.cell(row, level, *pair) for level, pair in row["pairs"].items()}

    def cell(self, row: dict, level: str, first: str, second: str) -> dict:
        a, b = self.variants[first], self.variants[second]
        rounds, clean = kept(a, b)
        times = [a.seconds[i] / a.elements / (b.seconds[i] / b.elements) for i in rounds]
        ratios = {"speed": [1 / t for t in times], "time": times, "share": [1 - 1 / t for t in times]}[row["kind"]]
        low, median, high = quartiles(ratios)
        best = min(a.seconds) / a.elements / (min(b.seconds) / b.elements)
        best = {"speed": 1 / best, "time": best, "share": 1 - 1 / best}[row["kind"]]
        # At full statistics nothing is asked, and with none they have no share.
        asked = row["target"] is not None and level != "full" and not (row["kind"] == "share" and level == "off")
        verdicts = {self.verdict(row, x) for x in ((median,) if clean else (median, best))} if asked else {""}
        verdict = verdicts.pop() if len(verdicts) == 1 else "undecided: noise"
        found = {"low": low, "median": median, "high": high, "best": best, "n": len(rounds)}
        return found | {"clean": clean, "asked": asked, "verdict": verdict}

    @staticmethod
    def verdict(row: dict, ratio: float) -> str:
        met = ratio >= row["target"] if row["kind"] == "speed" else ratio <= row["target"]
        return "met" if met else "**not met**"

    @staticmethod
    def cell_text(cell: dict | None) -> str:
        if cell is None:
            return "-"
        mark = "" if cell["clean"] else "\\*"
        verdict = ", " + cell["verdict"] if cell["asked"] else ""
        return f"{cell['median']:.3g}{mark} ({cell['low']:.3g} to {cell['high']:.3g}; {cell['best']:.3g}){verdict}"

    def ratio_lines(self) -> list[str]:
        lines = ["| ratio | target | statistics off | core | full (stated) |", "| --- | --- | --- | --- | --- |"]
        for row in self.ratios:
            sign = ">=" if row["kind"] == "speed" else "<="
            target = "-" if row["target"] is None else f"{sign} {row['target']}"
            if row["missing"]:
                lines.append(f"| {row['what']} | {target} | {row['missing']} | - | - |")
                continue
            cells = dict(row["cells"])
            if row["kind"] == "share":
                cells["off"] = None
            lines.append(f"| {row['what']} | {target} | " + " | ".join(map(self.cell_text, cells.values())) + " |")
        return lines

    # --- variants ---

    def variant_lines(self) -> list[str]:
        lines = [
            "| what | median ms | quartiles | best | Mparam/s | GB/s | B/param | of mimic | n |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for variant in self.variants.values():
            low, median, high = seconds(variant)
            rounds, clean = kept(variant)
            speed = variant.elements / median
            cells = [
                variant.name,
                f"{1e3 * median:.2f}" + ("" if clean else "\\*"),
                f"{1e3 * low:.2f} to {1e3 * high:.2f}",
            ]
            cells += [
                f"{1e3 * min(variant.seconds):.2f}",
                f"{speed / 1e6:.0f}",
                f"{speed * variant.bytes / 1e9:.2f}",
                f"{variant.bytes:.4g}",
            ]
            cells += [f"{speed / self.mimic_speed(variant.threads):.3f}", str(len(rounds))]
            lines.append("| " + " | ".join(cells) + " |")
        return lines

    def mimic_speed(self, threads: int) -> float:
        mimic = next(v for v in self.variants.values() if v.name.startswith("mimic") and v.threads == threads)
        return mimic.elements / seconds(mimic)[1]

    # --- the whole ---

    def load_text(self) -> str:
        load = self.about["load"]
        low, median, high = quartiles(load.shares)
        before, after = self.about["load_before"][0], os.getloadavg()[0]
        starred = sum(not kept(v)[1] for v in self.variants.values())
        disturbed = sum(sum(v.disturbed) for v in self.variants.values())
        repetitions = sum(len(v.seconds) for v in self.variants.values())
        return (
            f"Other processes used {median:.2f} cores (median over rounds; quartiles {low:.2f} and {high:.2f}, most "
            f"{max(load.shares):.2f}); load average {before:.1f} before, {after:.1f} after, which counts this run; "
            f"{load.waited_s:.0f} s spent waiting for quiet; priority {os.nice(0)}. {disturbed} of {repetitions} "
            f"repetitions were disturbed; {starred} of {len(self.variants)} variants could not be freed of them (\\*)."
        )

    def markdown(self) -> str:
        options = self.about["options"]
        date = datetime.date.today().isoformat()
        lines = ["# The CPU kernels, measured", ""]
        lines.append(f"`{self.about['command']}` on {machine()}; {date}.")
        lines.append(
            f"{options.elements} elements, {options.rounds} rounds in turns; our gradients {options.gradient}, the "
            "peers' fp32. Ratios are medians over rounds of the ratio within a round, quartiles in brackets, "
            "and behind the semicolon the ratio of the best times, which noise disturbs least. Where no quiet "
            "median is to be had (\\*), a target counts as met or not only if both say so. The fastest peer is the "
            "one with the best time. Our memory is in huge pages, as the CPU device's is; a peer's is as torch takes "
            "it where the row does not say huge pages."
        )
        lines += [self.load_text(), ""]
        lines += self.ratio_lines() + ["", "`share`: of a step's time, what statistics take. T: threads.", ""]
        lines += self.variant_lines() + ["", "Peers that ran: " + ("; ".join(self.about["versions"]) or "none") + "."]
        slow = [f"{v.name} ({v.elements})" for v in self.variants.values() if v.elements != options.elements]
        if slow:
            lines.append("On fewer elements, being slow: " + ", ".join(slow) + ".")
        lines += [f"**Not measured:** {name}: {reason}." for name, reason in self.about["absent"]]
        return "\n".join(lines) + "\n"

    def rows(self) -> list[dict]:
        rows = []
        for variant in self.variants.values():
            speed, bound = variant.elements / seconds(variant)[1] / 1e9, self.mimic_speed(variant.threads) / 1e9
            row = {"name": variant.name, "value": speed, "unit": "Gparam/s", "bound": bound, "ratio": speed / bound}
            rows.append(row | {"n": len(kept(variant)[0])})
        for ratio in self.ratios:
            for level, cell in ratio["cells"].items():
                if ratio["kind"] == "share" and level == "off":
                    continue
                target = ratio["target"] if cell["asked"] else None
                row = {
                    "name": f"{ratio['what']}, statistics {level}",
                    "value": cell["median"],
                    "unit": "",
                    "bound": target,
                }
                rows.append(row | {"ratio": cell["median"] / target if target else None, "n": cell["n"]})
        return rows
