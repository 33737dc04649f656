"""The optimizers. Each has its rule's arguments as torch names them, where torch has the rule, and those of
ballast.RunOptions: server, run, master, state, formats, weights and the rest. Its help names them all."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from ballast.biased import UNBIASED
from ballast.matrices import ADAMW, check_patterns, split_group
from ballast.optimizer import Optimizer
from ballast.options import RunOptions, complete_group
from ballast.rule import Rule

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ADAM_STEPS = ("lr", "weight_decay", "betas")
_SGD_STEPS = ("lr", "weight_decay", "momentum")

# Muon's, by Keller Jordan, as torch names them.
_NEWTON_SCHULZ = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5}
_NO_LR = (
    "adamw_lr is not given: parameters that are no matrices, or that adamw= names, are AdamW's, which takes another lr than Muon; "
    "give adamw_lr=, or adjust_lr_fn='match_rms_adamw'"
)

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
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rule": UNBIASED}
        super().__init__(params, Rule(UNBIASED, _ADAM_STEPS, ("eps",), decoupled=True), values, **options)


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


@_documented
class Muon(Optimizer):
    """torch.optim.Muon's rule (https://kellerjordan.github.io/posts/muon/, arXiv 2502.16982), and AdamW for what is no
    matrix, in one run.

        optimizer = ballast.Muon(model.named_parameters(), lr=0.02, adamw=["*embed*"], adamw_lr=3e-4, run="my-run")

    Parameters of two dimensions are matrices, and those of four and five, a convolution's filters, one each row. Parameters
    of fewer, and those whose names match a pattern of `adamw`, become a param_group of their own with "rule": "adamw"; so
    it is of each group that is given and names no rule. The daemon has whole matrices, also those of parameters that FSDP2
    has sharded: nothing is gathered among trainers. A daemon on a GPU needs cuBLAS there.

    adjust_lr_fn: None or "original", lr times sqrt(max(1, rows / columns)); "match_rms_adamw", times 0.2 sqrt(max(rows,
        columns)): then an update is as large as AdamW's, and takes its lr and weight_decay.
    ns_coefficients, ns_steps: torch's; the daemon has no others.
    adamw: names (fnmatch) of parameters that AdamW is to train: embeddings and the head, usually. A pattern that matches
        nothing is refused.
    adamw_lr: None takes lr, with "match_rms_adamw" alone; else it is needed where AdamW has something to train.
    adamw_betas, adamw_eps, adamw_weight_decay: AdamW's; None: weight_decay."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: str | Iterable[str] = (),
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        **options: Unpack[RunOptions],
    ):
        values = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._apart = [adamw] if isinstance(adamw, str) else list(adamw)
        if not isinstance(params, Tensor):
            params = [params] if isinstance(params, Mapping) else _materialized(params)
            check_patterns(self._apart, params)
        beside = {"betas": adamw_betas, "eps": adamw_eps, "lr_peak": None}
        if adamw_weight_decay is not None:
            beside["weight_decay"] = adamw_weight_decay
        if adamw_lr is not None:
            beside["lr"] = adamw_lr
        elif adjust_lr_fn == "match_rms_adamw":
            beside["lr"] = lr
        apart = Rule(ADAMW, _ADAM_STEPS, ("eps",), decoupled=True, values=beside, needs={"lr": _NO_LR})
        fixed = ("nesterov", "eps", "adjust_lr_fn")
        rule = Rule("muon", _SGD_STEPS, fixed, decoupled=True, others=(apart,), only=_NEWTON_SCHULZ)
        super().__init__(params, rule, values, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        groups = split_group(param_group, self._apart, self._parameters.given)
        for group in groups:
            complete_group(group, self.defaults, self._settings.rule)  # of none, if one of them cannot be added
        for group in groups:
            super().add_param_group(group)

    add_param_group.__doc__ = Optimizer.add_param_group.__doc__


def _materialized(params: Iterable[Any]) -> list[Any]:
    """A generator is read once."""
    return [
        {**item, "params": list(item["params"])} if isinstance(item, Mapping) and _is_read_once(item) else item
        for item in params
    ]


def _is_read_once(group: Mapping[str, Any]) -> bool:
    return isinstance(group.get("params"), Iterator)


class _Collage(Optimizer):
    def __init__(
        self, params: Iterable[Any], rule: str, values: dict[str, Any], state: str, options: RunOptions
    ) -> None:
        formats: RunOptions = {"master": "mcf", "state": state}
        super().__init__(params, Rule(rule, _ADAM_STEPS, ("eps",)), {**values, "rule": rule}, **(formats | options))


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
