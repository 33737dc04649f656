"""Objects that are looked for in the whole process, while other threads of it work."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from ballast import _core

# Another thread makes tuples of generators, whose length is not known, all the while.
LOOKING = """
import threading, torch
from torch import nn
from ballast import sharding_watch, wrappers

def make() -> None:
    try:
        while not over.is_set():
            tuple(number for number in range(200))
    except SystemError as error:
        errors.append(error)

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
import torch.distributed.fsdp
model, errors, over = nn.Linear(3, 3), [], threading.Event()
makers = [threading.Thread(target=make) for _ in range(2)]
for maker in makers:
    maker.start()
for _ in range(30):
    wrappers.find_wrapped()
    sharding_watch.check_not_gathered(model.named_parameters())
    sharding_watch.refuse_orphans(model.parameters())
over.set()
for maker in makers:
    maker.join()
assert not errors, errors
"""


class Layer(nn.Linear):
    pass


def test_instances_of_a_type_and_of_its_classes_are_found() -> None:
    plain, layer = nn.Linear(1, 1), Layer(1, 1)
    found = {id(one) for one in _core.live_instances(nn.Linear)}
    assert {id(plain), id(layer)} <= found
    only = _core.live_instances(Layer)
    assert any(one is layer for one in only) and all(type(one) is Layer for one in only)
    assert torch.nn.Bilinear not in {type(one) for one in _core.live_instances(nn.Module)}


@pytest.mark.parametrize("wrong", [1, None, "int", nn.Linear(1, 1)], ids=str)
def test_what_is_not_a_type_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        _core.live_instances(wrong)


def test_other_threads_do_not_notice() -> None:
    done = subprocess.run([sys.executable, "-c", LOOKING], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
