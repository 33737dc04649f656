"""The daemon's memory is what `ballastctl plan` said, whatever a trainer does."""

import pytest
from memory import check, measure


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_the_peak_is_the_plan(tmp_path, commit):
    parameters = 20_000_000
    # The run's chunks are small: 24 MiB beside the plan are six times what was measured.
    check(measure(tmp_path, parameters, commit), parameters, base=24 << 20)
