"""What a param_group may ask for, checked before anything is sent."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from ballast import _core
from ballast.errors import Rejected
from ballast.following import Follow
from ballast.rule import Rule
from ballast.spikes import Spikes
from ballast.tls import Tls
from ballast.torch_switches import check_switches

# The aliases of `master` and `state`, which win where they are given.
MASTERS = {24: "split24", 32: "split32"}
ROUNDINGS = ("stochastic", "nearest")
ADJUSTMENTS = ("original", "match_rms_adamw")  # torch's names of how Muon scales lr by a matrix's shape
WEIGHTS = (None, "client", "server", "match")

# How the daemon stores a tensor: options, and their aliases.
ALIASES = ("master_weight_bits", "state_dtype")
# Where a tensor is stored and what it travels in: what `formats` may choose by name.
FORMATS = ("master", "state", "rounding", "serving", "gradient_dtype")
# Options that every rule has and that are in the description of the run: with another the run is amended.
COMMON = {
    "lr_scale": 1.0,
    "wd_scale": 1.0,
    "master_weight_bits": 24,
    "state_dtype": "companded8",
    "master": None,
    "state": None,
    "rounding": "stochastic",
    "serving": None,
    "gradient_dtype": None,
    "decouple_lr": False,
    "lr_peak": None,
}


class RunOptions(TypedDict, total=False):
    """The arguments that all optimizers have, beside `params` and their rule's.

    server: "host:port" or "unix:path" of the daemon, or "local": one of this process's own, which its optimizers share and
        which ends with it, runs and all. Several addresses with commas between them: each daemon owns whole tensors of the
        run; the same list, in the same order, for every rank. Default: $BALLAST_SERVER, else "local".
    tls: a ballast.Tls that names the files of a connection that is encrypted, and shows who the trainer is. Default: what
        $BALLAST_TLS_CA, $BALLAST_TLS_CERTIFICATE and $BALLAST_TLS_KEY name; without them there is no TLS.
    token_file: the file of the token that the daemon's operator has given out (`ballastctl token`), which nobody else may
        read; it is sent over TLS or a Unix socket alone. Default: $BALLAST_TOKEN_FILE; without it none.
    run: the run's name on the daemon, [a-z0-9-], at most 63 characters. Default: $BALLAST_RUN. Needed.
    master, state: how the daemon stores weights ("split24", "split32", "fp32", "bf16", ...) and moments ("companded8",
        "bf16", "fp32", ...). None: as the two aliases say. Collage needs "mcf", its default.
    master_weight_bits: alias of master: 24 (split24, fp32 rounded to 24 bits) or 32 (split32, fp32 exactly).
    state_dtype: alias of state.
    rounding: "stochastic" or "nearest", of the compressed formats.
    serving: None, weights return in the parameter's dtype, or what they return in to save traffic: "fp8-e4m3",
        "int8-row", "int8-tensor". They are decoded to the parameter's dtype on arrival, but for layers of ballast.nn, which
        compute in them.
    gradient_dtype: None, gradients leave in the parameter's dtype, or what they are converted to: "fp8-e5m2", "bf16",
        "fp16", "fp32". What is too large for it becomes an infinity, and its block is not updated.
    error_feedback: what a gradient loses when it is converted to a narrower gradient_dtype is added to the tensor's next one,
        so that a format of 8 bits loses nothing in the long run. The trainer keeps it in bf16, 2 bytes a parameter, until it
        ends; a process that takes its place begins with none.
    formats: {pattern: {"master": ..., "state": ..., "rounding": ..., "serving": ..., "gradient_dtype": ...}} for
        parameters by name (fnmatch; the first pattern that matches), over what their group says, as
        {"*embed*": {"master": "fp32", "state": "fp32"}}. A pattern that matches nothing is refused.
    lr_scales: {name: factor of lr}, on top of the group's lr_scale; see ballast.umup_scales.
    decouple_lr, lr_peak: weight decay is multiplied by lr / lr_peak instead of lr, so that it does not depend on the
        scale of lr. For rules with decoupled decay; the peak is by default the lr that the group begins with.
    loss_scale: what the loss was multiplied by before backward(), to keep narrow gradients in range: the daemon divides by
        it. The attribute may be set between steps. ballast.GradScaler sets it by itself.
    commit: "release", each tensor is updated as soon as its gradient is complete, while backward goes on; "staged", all
        are updated after the verdict over the whole step, or none: atomic also when a trainer dies, at the price of the
        overlap and of 4 bytes a parameter in the daemon, 2 where one trainer sends gradients in 2 bytes and
        gradient_accumulation_steps=1. A staged step may have any number of backward(), may be
        clipped by clip_grad_norm_, and dropped by zero_grad(). "auto": staged if max_grad_norm, nonfinite="skip_step",
        Spikes(action="skip") or a ballast.GradScaler needs it, or a framework makes the steps that clips, accumulates and skips
        by itself: Accelerate, HF Trainer, Lightning, torchtune; else release. With weights="server" as the run was begun.
    max_grad_norm: exact clipping by the L2 norm over all tensors of the gradient, summed over micro-batches and averaged
        over ranks: as torch.nn.utils.clip_grad_norm_. The norm is last_result.grad_norm.
    tensor_clip: "adagc" holds each tensor's gradient to 1.05 times its own usual norm (AdaGC, arXiv 2502.11034), in its
        first 100 steps to 1; in "release" too. None: does not.
    nonfinite: what a NaN or an infinity in a gradient does. "skip_tensor": its block of 32 keeps its contents and is
        counted; "skip_step": the step is SKIPPED; "stop": no later step begins.
    spikes: a ballast.Spikes: what counts as a loss spike or its herald, and what is done then. Default: StepResult.spikes
        and a Python warning tell of it.
    gradient_accumulation_steps: backward() that make one step. Their gradients are summed, as torch does: divide the loss
        by their number for a mean. In release a step has so many, or fewer where Optimizer.accumulate, no_sync() or
        Accelerate tells which is the last; default 1. A staged step has at most so many; default 1024.
    snapshots, snapshot_every: how many snapshots of past steps the daemon keeps in its memory, at most 16, each as large as
        weights and moments, and of every how many steps, 50 by default; the run can be rewound to them. See Optimizer.rewind.
    checkpoint_every_steps, checkpoint_every_seconds: when a daemon that has storage writes the run to its disk, so that it
        survives the daemon: after each step that is a multiple of the one; so many seconds after the last time; or both.
        Neither: every 600 seconds. A daemon without storage refuses them and checkpoints_kept. See Optimizer.checkpoint.
    checkpoints_kept: how many stay there, the newest, from 2 to 100. None: 2.
    durability: what a crash of the daemon takes. "checkpoint": the steps since the last one; "journal": the last steps, at
        most journal_steps; "journal_sync": none whose step() has returned. With a journal the daemon also writes each
        step's gradients, 2 or 4 bytes a parameter, and makes the steps again from them, to the same bits. None:
        "checkpoint".
    journal_steps: with a journal, how many closed steps may wait for the disk before the next one does, at most 10,000. None: 16.
    follow: True, or a ballast.Follow(every, readers, ...): evaluators and inference engines may keep up with the run's weights, by
        ballast.follow, ballast.Subscriber or `ballastctl follow`. A run that was begun without, or with
        another, has this one from the time on when its trainer is started with it, and its snapshots go then.
    ema: decays of exponential moving averages of the weights, at most four, as [0.999, 0.9999]: the daemon keeps them, 3 bytes
        a parameter each, and moves them at each step that is applied, as torch.optim.swa_utils.AveragedModel does with
        get_ema_multi_avg_fn. See Optimizer.average and Optimizer.averaged. For the whole life of a run.
    on_torn: what a step does that closes PARTIAL, because a trainer died in it after some tensors were updated. "close": it
        stands, and training goes on; "rewind": the run goes back to the last snapshot before it.
    on_lost_rank: what becomes of a trainer that is lost for longer than rank_timeout. "wait": each step waits for it as long
        again, and comes to nothing; "continue": steps go on without it, as the mean over the others, which
        last_result.ranks_left_out tells, until a process takes its rank; that one takes part from the next step on, and
        needs weights="server". One that has never attached is awaited in any case: it has to begin as the others do.
    rank_timeout: for how many seconds, 60 by default, after the daemon's lease, a step waits for a trainer that was lost; then it
        closes PARTIAL or ABORTED, and so does each later one until a process takes that rank.
    step_timeout: for how many seconds a step, from its first backward() anywhere, waits for a trainer that could send, also
        one that is there and silent, as in an endless loop; then it closes likewise. What a trainer itself waits for
        another does not count. None: as long as they are connected, since one that evaluates for half an hour is silent too.
    overlap_forward: step() does not wait for the new weights: the next forward does, module by module.
    weights: what the first gradient does about weights. "client": upload the trainer's, before the run's first step.
        "match": refuse to go on unless trainer and daemon have the same. "server": the constructor overwrites the
        trainer's weights in place with the daemon's, of a run that is there; see Optimizer.connect for one that may not be. None: "client" for a run without a step, else "match".
    changed_weights: what becomes of weights that the trainer changes by itself after its first gradient (load_state_dict(),
        an operation in place, p.data = ...), which the daemon's next ones would overwrite. "refuse": the next step raises
        Rejected before its first gradient leaves, and names them; pull() takes the daemon's. One that is made while a step
        is open is told at its end. Weights that were changed and put back pass. A change in place through .data or numpy is
        looked for in 1 KiB of each tensor on the CPU, another at each step. "upload": those changed between two steps are
        uploaded before the next one, and moments stay, as do the masters of elements that are as they were; every rank makes the
        same change before the same step, and rank 0's is sent. "overwrite": they are lost, and nothing is said.
    saved_state: what state_dict() has of moments and masters. "full": all, in fp32. "reference": only which run and step
        they are of, so that load_state_dict() takes the same run there, if it is there or keeps a snapshot of it. None:
        "full" up to 1e9 parameters.
    start_over: delete the run of this name, if there is one, and create it anew, when it is created: at the first gradient
        or by connect(). Rejected while somebody trains in it, and with several ranks. Not for a script that is restarted
        to go on after a failure.
    takeover: fence a live trainer that holds this rank, instead of being refused.
    seed: of the stochastic rounding. Same gradients, names and seed: same bits.
    rank, world (world_size): which of how many trainers this is; default: those of torch.distributed where that is
        initialized before the optimizer is made, else 0 of 1; rejected where a launcher has started several processes by then. Each
        step is made of the mean of all ranks' gradients, and step() returns when every rank has ended it.
        Rank 0 uploads the weights; the others must begin with the same, and send their digests.
    max_world: how many ranks a run of sharded parameters may come to have, when more go on with it than have begun it: the
        daemon reserves memory for so many. Default: world.
    transport: "auto": gradients and weights go through memory shared with the daemon where it is on the same host,
        else over "grpc". "shm": refuse to go on without it. "gpu": likewise, of a model on one GPU, in memory of the daemon's GPU
        if that can be. "nccl": to a daemon's GPU anywhere by NCCL if that can be, else as "auto". Neither has yet run on a GPU.
    connect_timeout, reconnect_timeout: seconds to wait for the daemon in the constructor, 3, and for one that was lost later, 15.
    join_timeout: seconds to wait, when joining the run, for the end of a step that is being made without this trainer; 3600
        by default. Longer than a step may be.
    gradient_buffer_bytes: how much of a step's gradients may wait in host memory for the daemon to take it, 1 GiB by default.
        Beyond that backward() waits: for a daemon that is slower than backward, and for trainers that are behind.
    """

    server: str | None
    tls: Tls | None
    token_file: str | os.PathLike[str] | None
    run: str | None
    master: str | None
    state: str | None
    master_weight_bits: Literal[24, 32]
    state_dtype: str
    rounding: Literal["stochastic", "nearest"]
    serving: str | None
    gradient_dtype: str | None
    error_feedback: bool
    formats: Mapping[str, Mapping[str, Any]] | None
    lr_scales: Mapping[str, float] | None
    decouple_lr: bool
    lr_peak: float | None
    loss_scale: float
    commit: Literal["auto", "release", "staged"]
    max_grad_norm: float | None
    tensor_clip: Literal["adagc"] | None
    nonfinite: Literal["skip_tensor", "skip_step", "stop"]
    spikes: Spikes | None
    gradient_accumulation_steps: int
    snapshots: int
    snapshot_every: int
    checkpoint_every_steps: int | None
    checkpoint_every_seconds: float | None
    checkpoints_kept: int | None
    durability: Literal["checkpoint", "journal", "journal_sync"] | None
    journal_steps: int | None
    follow: bool | Follow
    ema: float | Sequence[float] | None
    on_torn: Literal["close", "rewind"]
    on_lost_rank: Literal["wait", "continue"]
    rank_timeout: float
    step_timeout: float | None
    overlap_forward: bool
    weights: Literal["client", "server", "match"] | None
    changed_weights: Literal["refuse", "upload", "overwrite"]
    saved_state: Literal["full", "reference"] | None
    start_over: bool
    takeover: bool
    seed: int
    rank: int | None
    world: int | None
    world_size: int | None
    max_world: int | None
    transport: Literal["auto", "grpc", "shm", "gpu", "nccl"]
    connect_timeout: float
    reconnect_timeout: float
    join_timeout: float
    gradient_buffer_bytes: int


@functools.cache
def _registry() -> dict[str, Any]:
    return _core.numerics.registry()


def _masters() -> list[str]:
    return [master["name"] for master in _registry()["masters"]]


def _states() -> list[str]:
    return [state["name"] for state in _registry()["states"]]


def _gradients() -> list[str]:
    return [wire["name"] for wire in _registry()["wires"] if wire["gradient"]]


def _servings() -> list[str]:
    """Those that a trainer does not compute in: they are decoded on arrival."""
    return [wire["name"] for wire in _registry()["wires"] if wire["serving"] and not wire["gradient"]]


def _number(test: Callable[[float], bool]) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        if isinstance(value, (str, bytes, bool)):  # float() takes them; a scheduler, which computes with them, does not
            return False
        try:
            return math.isfinite(float(value)) and test(float(value))
        except (TypeError, ValueError):
            return False

    return holds


def _is_betas(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_number(lambda x: 0 <= x < 1), value))


_AT_LEAST_0 = (_number(lambda x: x >= 0), "a finite number of at least 0")
_CHECKS: dict[str, tuple[Callable[[Any], bool], str | Callable[[], str]]] = {
    "lr": _AT_LEAST_0,
    "betas": (_is_betas, "two numbers, each at least 0 and below 1"),
    "eps": (_number(lambda x: x > 0), "a finite number above 0"),
    "weight_decay": _AT_LEAST_0,
    "loss_scale": (_number(lambda x: x > 0), "a finite number above 0"),
    "momentum": (_number(lambda x: 0 <= x < 1), "a number of at least 0 and below 1"),
    "dampening": (_number(lambda x: 0 <= x <= 1), "a number between 0 and 1"),
    "nesterov": (lambda x: isinstance(x, bool), "True or False"),
    "adjust_lr_fn": (lambda x: x in (None, *ADJUSTMENTS), f"None, {' or '.join(map(repr, ADJUSTMENTS))}"),
    "lr_scale": _AT_LEAST_0,
    "wd_scale": _AT_LEAST_0,
    "master_weight_bits": (lambda x: x in MASTERS, "24 or 32"),
    "state_dtype": (lambda x: x in _states(), lambda: _one_of(_states())),
    "master": (lambda x: x is None or x in _masters(), lambda: f"None or {_one_of(_masters())}"),
    "state": (lambda x: x is None or x in _states(), lambda: f"None or {_one_of(_states())}"),
    "rounding": (lambda x: x in ROUNDINGS, "'stochastic' or 'nearest'"),
    "serving": (lambda x: x is None or x in _servings(), lambda: f"None or {_one_of(_servings())}"),
    "gradient_dtype": (lambda x: x is None or x in _gradients(), lambda: f"None or {_one_of(_gradients())}"),
    "error_feedback": (lambda x: isinstance(x, bool), "True or False"),
    "decouple_lr": (lambda x: isinstance(x, bool), "True or False"),
    "lr_peak": (lambda x: x is None or _number(lambda y: y > 0)(x), "None or a finite number above 0"),
}

# Options under another name: what is written in their place.
_RENAMED = {"lane": "transport"}

# Options of the whole run, but for names that other libraries give to what their groups have.
_OF_RUN = RunOptions.__annotations__.keys() - COMMON.keys() - {"rank", "world", "world_size", "seed", "run"}


def _one_of(names: Sequence[str]) -> str:
    return "one of " + ", ".join(repr(name) for name in names)


def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """TypeError, as Python's for arguments. One whose name is another now is told it."""
    for name in given:
        if name not in known:
            instead = f": write {_RENAMED[name]}= in its place" if name in _RENAMED else ""
            raise TypeError(f"{where}() got an unexpected keyword argument '{name}'{instead}")


def check_option(option: str, value: Any, where: str) -> None:
    """Rejected, naming the option, what it is and what it may be."""
    holds, wanted = _CHECKS[option]
    if not holds(value):
        raise Rejected(f"{option}={value!r}{where}: it must be {wanted if isinstance(wanted, str) else wanted()}")


def check_group(group: Mapping[str, Any], rules: Rule) -> None:
    rule = rules.of(group)
    where = f" of group '{group['name']}'" if "name" in group else ""
    for option in (*rule.steps, *rule.fixed, *COMMON):
        if option not in group:
            raise Rejected(f"{option} is missing{where}: {rule.name} needs it")
        check_option(option, group[option], where)
    check_switches(group, rule, where)
    _check_of_run(group, rules, where)
    for option, value in rule.only.items():
        if isinstance(value, tuple) and group[option] is not None and tuple(group[option]) == value:
            continue
        if group[option] != value:
            raise Rejected(f"{option}={group[option]!r}{where}: the daemon has {value!r} alone; leave it out")
    if (group["decouple_lr"] or group["lr_peak"] is not None) and not rule.decoupled:
        raise Rejected(
            f"decouple_lr and lr_peak{where} are for rules with decoupled weight decay, which {rule.name} lacks"
        )
    if "dampening" in rule.fixed and group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise Rejected(f"nesterov=True{where}: Nesterov momentum needs a momentum and no dampening")


def _check_of_run(group: Mapping[str, Any], rules: Rule, where: str) -> None:
    """Rejected if the group has what only the whole run can have, and nothing would come of it."""
    where = where or " of a param_group"
    for option in _OF_RUN & group.keys():
        raise Rejected(
            f"{option}={group[option]!r}{where}: it is an option of the whole run; give it to the constructor, "
            "beside the groups"
        )
    if not rules.others and group.get("rule", rules.name) != rules.name:
        raise Rejected(
            f"rule={group['rule']!r}{where}: all groups of this optimizer have the rule {rules.name!r}. Make "
            "another optimizer for such parameters, or ballast.Muon, whose groups may name theirs"
        )


def complete_group(given: Mapping[str, Any], defaults: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
    """A group as it is added, checked, with the defaults for what it lacks. decouple_lr without a peak takes the lr that the
    group begins with."""
    own = rule.of(given)
    for option, reason in own.needs.items():
        if option not in given and option not in own.values:
            raise Rejected(reason)
    group = {**defaults, **own.values, **given}
    if isinstance(group["params"], set):
        raise Rejected("'params' is a set, whose order changes between runs: give a list")
    check_group(group, rule)
    if group["decouple_lr"] and group["lr_peak"] is None:
        if float(group["lr"]) == 0:
            raise Rejected("decouple_lr=True of a group that begins with lr=0, which is no peak: give lr_peak=")
        group["lr_peak"] = float(group["lr"])
    return group


def loaded_group(ours: Mapping[str, Any], saved: Mapping[str, Any], rules: Rule) -> dict[str, Any]:
    """A group as load_state_dict() leaves it: what it lacks keeps its value, and so do formats, which are of the run that is
    trained here. Rejected if it was of another rule."""
    if "rule" in saved and rules.others and rules.of(saved) != rules.of(ours):
        raise Rejected(
            f"a param_group of the state_dict has the rule {saved['rule']!r}, and that of the same place here "
            f"{rules.of(ours).name!r}: give the optimizer its groups in the order in which they were saved"
        )
    return {**ours, **{key: value for key, value in saved.items() if key not in (*FORMATS, *ALIASES, "rule")}}


def hyper_values(group: Mapping[str, Any], rule: Rule) -> dict[str, float]:
    """The hyperparameters that a run fixes of a group."""
    values = {option: float(group[option]) for option in rule.fixed if option != "adjust_lr_fn"}
    if "adjust_lr_fn" in rule.fixed:
        values["match_rms"] = float(group["adjust_lr_fn"] == "match_rms_adamw")
    if group["lr_peak"] is not None:
        values["lr_peak"] = float(group["lr_peak"])
    return values


def format_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """The FORMATS of a group, the aliases resolved."""
    master, state = group["master"] or MASTERS[group["master_weight_bits"]], group["state"] or group["state_dtype"]
    return {**{option: group[option] for option in FORMATS}, "master": master, "state": state}


def check_scales(scales: Mapping[str, float], names: Sequence[str]) -> None:
    """Rejected unless each is a factor of lr for a parameter that is there."""
    for name, scale in scales.items():
        check_option("lr_scale", scale, f" of lr_scales[{name!r}]")
        if name not in names:
            raise Rejected(f"lr_scales has '{name}', and there is no such parameter")


def check_feedback(asked: bool, formats: Iterable[str | None]) -> None:
    """Rejected if error_feedback has nothing to give back; formats: the gradient_dtype of each group."""
    if asked and all(format is None for format in formats):
        raise Rejected(
            "error_feedback=True and no gradient_dtype: gradients leave as they are, and lose nothing. Write "
            "gradient_dtype='fp8-e5m2', or 'bf16', or leave error_feedback out"
        )
