"""The optimizers. Each has its rule's arguments as torch names them, where torch has the rule, and those of
ballast.RunOptions: server, run, master, state, formats, weights and the rest. Its help names them all."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from ballast.optimizer import Optimizer
from ballast.options import Rule, RunOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ADAM_STEPS = ("lr", "weight_decay", "betas")
_SGD_STEPS = ("lr", "weight_decay", "momentum")

_Kind = TypeVar("_Kind", bound=type[Optimizer])

# Of the rules that torch has.
_SWITCHES = """foreach, fused and, where it is there, capturable choose one of torch's implementations, not a result:
they are taken and mean nothing here. maximize, differentiable and amsgrad must be False."""


def _documented(kind: _Kind) -> _Kind:
    """With the options that all rules have in its docstring."""
    parts = [inspect.getdoc(kind), inspect.getdoc(RunOptions)]
    if "fused" in inspect.signature(kind).parameters:
        parts.insert(1, _SWITCHES)
    kind.__doc__ = "\n\n".join(part for part in parts if part)
    return kind


@_documented
class Adam(Optimizer):
    """torch.optim.Adam's rule: weight_decay is an L2 penalty, added to the gradient."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[RunOptions],
    ):
        values = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, Rule("adam", _ADAM_STEPS, ("eps",)), values, **options)


@_documented
class AdamW(Optimizer):
    """torch.optim.AdamW's rule: weight decay is decoupled from the gradient.

        optimizer = ballast.AdamW(model.named_parameters(), lr=1e-3, server="node7:7700", run="my-run")
        for batch in batches:
            loss = model(batch)
            loss.backward()           # each gradient leaves as it is made; p.grad is None afterwards
            optimizer.step(loss=loss) # returns when every new weight is in place

    All its other arguments follow.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[RunOptions],
    ):
        values = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, Rule("adamw", _ADAM_STEPS, ("eps",), decoupled=True), values, **options)


@_documented
class StableAdamW(Optimizer):
    """AdamW whose lr is divided, tensor by tensor, by the root mean square of its update where that is above 1
    (arXiv 2304.13013): in place of gradient clipping, and without a global norm."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        **options: Unpack[RunOptions],
    ):
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, Rule("stable_adamw", _ADAM_STEPS, ("eps",), decoupled=True), values, **options)


@_documented
class SGD(Optimizer):
    """torch.optim.SGD's rule: weight_decay is an L2 penalty. decoupled=True: it is decoupled from the gradient, as
    AdamW's (SGDW of arXiv 1711.05101)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled: bool = False,
        **options: Unpack[RunOptions],
    ):
        values = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        rule = Rule("sgdw" if decoupled else "sgd", _SGD_STEPS, ("dampening", "nesterov"), decoupled)
        super().__init__(params, rule, values, **options)


@_documented
class Lion(Optimizer):
    """The sign of a mean of gradients (arXiv 2302.06675), with decoupled weight decay. One moment only. Its lr wants to
    be 3 to 10 times smaller than AdamW's, and its weight_decay as much larger."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[RunOptions],
    ):
        values = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, Rule("lion", _ADAM_STEPS, decoupled=True), values, **options)


class _Collage(Optimizer):
    def __init__(
        self, params: Iterable[Any], rule: str, values: dict[str, Any], state: str, options: RunOptions
    ) -> None:
        formats: RunOptions = {"master": "mcf", "state": state}
        super().__init__(params, Rule(rule, _ADAM_STEPS, ("eps",)), values, **(formats | options))


@_documented
class CollageLight(_Collage):
    """AdamW in bf16 alone, with weights of two bf16 components (arXiv 2405.03637). Its master is mcf, its state bf16."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[RunOptions],
    ):
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, "collage_light", values, "bf16", options)


@_documented
class CollagePlus(_Collage):
    """CollageLight whose second moment and beta2 have two components too, which beta2 above .99 needs. Its master and
    state are mcf."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[RunOptions],
    ):
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, "collage_plus", values, "mcf", options)
