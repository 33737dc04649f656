"""Objects that are known as long as they live."""

from __future__ import annotations

import gc
import threading
from typing import Any

from ballast.weak_registry import WeakRegistry


class One:
    pass


def test_it_holds_each_once_until_it_is_discarded_or_gone() -> None:
    registry: WeakRegistry[One] = WeakRegistry()
    one, other = One(), One()
    for added in (one, other, one):
        registry.add(added)
    assert list(registry) == [one, other]
    registry.discard(one)
    registry.discard(one)
    assert list(registry) == [other]
    del other, added
    gc.collect()
    assert list(registry) == []


def test_it_may_change_while_it_is_gone_through() -> None:
    registry: WeakRegistry[One] = WeakRegistry()
    kept = [One() for _ in range(3)]
    for one in kept:
        registry.add(one)
    seen = []
    for one in registry:
        registry.discard(one)
        kept.append(One())
        registry.add(kept[-1])
        seen.append(one)
    assert seen == kept[:3] and list(registry) == kept[3:]


def test_what_is_collected_within_a_call_may_call_it() -> None:
    """As an optimizer does that is deleted while another one is made."""
    registry: WeakRegistry[One] = WeakRegistry()
    leaving, staying = [One() for _ in range(50)], [One() for _ in range(50)]

    class Garbage:
        def __init__(self, held: One):
            self.itself, self.held = self, held

        def __del__(self) -> None:
            registry.discard(self.held)

    def work() -> None:
        for i, (gone, kept) in enumerate(zip(leaving, staying)):
            registry.add(gone)
            Garbage(gone)
            counted.append([[] for _ in range(i % 7)])  # so that the collection comes elsewhere
            registry.add(kept)

    counted: list[Any] = []
    thresholds = gc.get_threshold()
    gc.set_threshold(5, 1, 1)
    try:
        working = threading.Thread(target=work, daemon=True)
        working.start()
        working.join(60)
        assert not working.is_alive()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert list(registry) == staying
