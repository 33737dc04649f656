"""What got worse since the committed table by more than noise. For people to read, no test."""

import statistics

HIGHER, LOWER = {"GB/s", "G/s", "Gparam/s", "%"}, {"s", "ms", "us", "ns"}  # what is better; other units are no speeds
LEAST_NOISE = 0.05
UNKNOWN_NOISE = 0.15  # of a figure whose row does not say


def noise(values: list[float]) -> float:
    """Half of what lies between the quartiles, as a share of the median: the key `noise` of a row, of its ratio where it
    has one."""
    if len(values) < 2:
        return UNKNOWN_NOISE
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / abs(middle) if middle else UNKNOWN_NOISE


def figure(row: dict) -> float:
    """The ratio to what was measured beside it says more than the figure itself."""
    return row["value"] if row["ratio"] is None else row["ratio"]


def comparable(row: dict, before: dict) -> bool:
    """Speeds, of the same machine, and both of short runs or both not."""
    same = all(row[key] == before[key] for key in ("machine", "unit", "quick"))
    return same and row["unit"] in HIGHER | LOWER and figure(before) != 0


def worse_by(row: dict, before: dict) -> float:
    """By which share of it, beyond the noise of both; 0: it is not."""
    change = figure(row) / figure(before) - 1
    if row["unit"] in HIGHER:
        change = -change
    allowed = max(LEAST_NOISE, row.get("noise", UNKNOWN_NOISE) + before.get("noise", UNKNOWN_NOISE))
    return change if change > allowed else 0


def report(fresh: list[dict], committed: list[dict]) -> str:
    """A line for each figure that is worse, and how many were compared."""
    then = {(row["benchmark"], row["name"]): row for row in committed}
    pairs = [(row, then[key]) for row in fresh if (key := (row["benchmark"], row["name"])) in then]
    pairs = [(row, before) for row, before in pairs if comparable(row, before)]
    lines = [
        f"WORSE by {100 * worse:.0f} %: {row['benchmark']}: {row['name']}: {figure(row):.4g}, and {figure(before):.4g} "
        f"on {before['date']} ({before['commit']})"
        for row, before in pairs
        if (worse := worse_by(row, before))
    ]
    summary = f"{len(pairs)} of {len(fresh)} figures can be compared with results/results.json; {len(lines)} are worse."
    return "\n".join(lines + [summary])
