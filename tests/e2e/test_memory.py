"""The daemon's memory is what `ballastctl plan` said, whatever a trainer does."""

from memory import check, measure


def test_the_peak_is_the_plan(tmp_path):
    parameters = 20_000_000
    # Its chunks are small: 24 MiB beside the plan are six times what was measured.
    check(measure(tmp_path, parameters), parameters, base=24 << 20)
