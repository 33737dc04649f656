"""What is timed in turns within a round, some of it against other: ratios within a round, and rows for the results."""

import statistics

from comparison import noise


def ratios(seconds: dict[str, list[float]], name: str, against: str) -> list[float]:
    """By round."""
    return [value / bound for value, bound in zip(seconds[name], seconds[against])]


def rows(seconds: dict[str, list[float]], against: dict[str, str | None], rounds: int) -> list[dict]:
    """Of what is held against something, in milliseconds. `against`: by name."""
    made = []
    for name, other in against.items():
        if other is None:
            continue
        value, bound = (1000 * statistics.median(seconds[of]) for of in (name, other))
        shares = ratios(seconds, name, other)
        made.append({"name": f"{name} against {other}", "value": value, "unit": "ms", "bound": bound, "n": rounds})
        made[-1] |= {"ratio": statistics.median(shares), "noise": noise(shares)}
    return made
