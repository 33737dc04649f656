"""Objects that are known as long as they live."""

from __future__ import annotations

import gc

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
