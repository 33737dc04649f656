"""The daemon's memory is what `ballastctl plan` said, whatever a trainer does."""

import pytest
from memory import BASE_BYTES, check, measure


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_the_peak_is_the_plan(tmp_path, commit):
    # What stands beside the plan does not grow with the model (4 to 23 MiB on a busy machine, of 20 and of 60 million
    # parameters), so that the plan is to be much more than it.
    parameters = 60_000_000
    check(measure(tmp_path, parameters, commit), parameters, base=BASE_BYTES)
