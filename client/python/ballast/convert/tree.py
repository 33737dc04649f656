"""What a checkpoint's file holds: nested dicts and lists, and where in them an optimizer's state_dict is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ballast.errors import Rejected

DEPTH = 4  # how far down an optimizer is looked for


@dataclass(frozen=True)
class Deferred:
    """A leaf that is no tensor and is read when it is asked for: what nobody asks for need not be readable."""

    read: Callable[[], Any]


def settle(node: Any) -> Any:
    """The same with every Deferred read."""
    if isinstance(node, Deferred):
        return settle(node.read())
    if isinstance(node, dict):
        return {key: settle(value) for key, value in node.items()}
    return [settle(value) for value in node] if isinstance(node, list) else node


def is_flat(node: Any) -> bool:
    """Whether it is an optimizer's state_dict with names joined by dots: state.NAME.SLOT, param_groups.NAME.OPTION."""
    keys = [key for key in node if isinstance(key, str)] if isinstance(node, dict) else []
    return any(key.startswith("param_groups.") for key in keys) and any(key.startswith("state.") for key in keys)


def is_optimizer(node: Any) -> bool:
    """Whether it is an optimizer's state_dict, nested or flat."""
    nested = isinstance(node, dict) and isinstance(node.get("state"), dict) and "param_groups" in node
    return nested or is_flat(node)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        yield from ((str(key), value) for key, value in node.items())
    elif isinstance(node, list):
        yield from ((str(index), value) for index, value in enumerate(node))


def _optimizers(node: Any, at: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if is_optimizer(node):
        yield ".".join(at), node
    elif len(at) < DEPTH:
        for key, child in _children(node):
            yield from _optimizers(child, (*at, key))


def _at(node: Any, part: str) -> Any:
    """What is at a dotted path; None if nothing is. A key may have dots of its own."""
    if not part:
        return node
    for key, child in _children(node):
        if part == key or part.startswith(f"{key}."):
            found = _at(child, part[len(key) + 1 :])
            if found is not None:
                return found
    return None


def find_optimizer(tree: Any, part: str | None, where: str) -> dict[Any, Any]:
    """The state_dict of the optimizer in a file, read. part: where it is, as keys joined by dots; None where there is
    one alone. Rejected, saying what there is, if there is none or more than one."""
    found = dict(_optimizers(tree, ()))
    if part is not None:
        node = _at(tree, part)
        if not is_optimizer(node):
            raise Rejected(f"--part {part}: there is no optimizer's state_dict there in {where}{_offer(found)}")
        return dict(settle(node))
    if not found:
        keys = ", ".join(key for key, _ in list(_children(tree))[:10]) or type(tree).__name__
        raise Rejected(
            f"{where} holds no optimizer's state_dict, a dict with 'state' and 'param_groups', but: {keys}. Give the "
            "file that optimizer.state_dict() was saved to"
        )
    if len(found) > 1:
        raise Rejected(f"{where} holds {len(found)} optimizers: choose one with --part{_offer(found)}")
    return dict(settle(next(iter(found.values()))))


def _offer(found: dict[str, Any]) -> str:
    parts = [part for part in list(found)[:10] if part]
    return f": {', '.join(parts)}" if parts else ""


def from_paths(leaves: dict[tuple[str | int, ...], Any], where: str) -> Any:
    """The tree whose leaves have these paths; integers are places in lists."""
    root: dict[str | int, Any] = {}
    for path, leaf in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise Rejected(
                    f"{where}: {'.'.join(map(str, path))} lies below what is not a dict: the file is damaged"
                )
        node[path[-1]] = leaf
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    settled = {key: _with_lists(value) for key, value in node.items()}
    if settled and all(isinstance(key, int) for key in settled):
        return [settled[key] for key in sorted(settled)]
    return settled
