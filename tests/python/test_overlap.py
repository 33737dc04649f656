"""overlap_forward: the next forward waits for the weights, not step()."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ballast
from models import assert_close, layered, perceptron, same_bits, spirals, weights_of

AdamW = Callable[..., ballast.AdamW]


def train(optimizer: ballast.AdamW, model: nn.Module, steps: int) -> list[torch.Tensor]:
    points, labels = spirals(seed=1)
    for _ in range(steps):
        loss = F.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step(loss=loss)
    optimizer.wait()
    return weights_of(model)


def under_way(optimizer: ballast.AdamW) -> bool:
    """Whether a step was ended whose result is not in yet."""
    session = optimizer._membership.session
    assert session is not None
    return session.ended


def test_it_gives_the_same_bits(adamw: AdamW) -> None:
    model, twin = perceptron(seed=1), perceptron(seed=1)
    waits = adamw(model.named_parameters(), lr=1e-2)
    overlaps = adamw(twin.named_parameters(), lr=1e-2, run=f"{waits.run}-twin", overlap_forward=True)
    assert same_bits(train(waits, model, 30), train(overlaps, twin, 30))
    assert overlaps.last_result is not None and overlaps.last_result.step == 30


def test_it_gives_the_same_bits_with_micro_batches(adamw: AdamW) -> None:
    model, twin = perceptron(seed=1), perceptron(seed=1)
    one = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    other = adamw(twin.named_parameters(), gradient_accumulation_steps=2, run=f"{one.run}-twin", overlap_forward=True)
    points, labels = spirals(seed=1)
    for _ in range(5):
        for net, optimizer in ((model, one), (twin, other)):
            for final in (False, True):
                with optimizer.accumulate(final):
                    F.cross_entropy(net(points), labels).backward()
            optimizer.step()
    other.wait()
    assert same_bits(weights_of(model), weights_of(twin))


def test_step_returns_before_the_result_and_asking_for_it_waits(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), overlap_forward=True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert under_way(optimizer)
    assert optimizer.last_result is not None and optimizer.last_result.applied
    assert not under_way(optimizer) and not optimizer.step_was_skipped
    optimizer.step()
    assert optimizer.step_was_skipped


def test_a_module_that_reads_its_childrens_weights_waits_for_them(adamw: AdamW) -> None:
    torch.manual_seed(1)
    model = nn.MultiheadAttention(8, 2, batch_first=True)  # never calls out_proj
    optimizer = adamw(model.named_parameters(), overlap_forward=True)
    x = torch.randn(2, 3, 8)
    for _ in range(3):
        model(x, x, x)[0].square().sum().backward()
        optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == 3


def test_weights_read_outside_of_a_module_are_found_out(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), overlap_forward=True)

    def functional() -> torch.Tensor:
        return F.linear(torch.ones(2, 8), model[0].weight).sum()

    functional().backward()
    optimizer.step()
    with pytest.raises(ballast.Rejected, match="'0.weight' got a gradient.*no module's forward waited.*wait\\(\\)"):
        functional().backward()
    optimizer.wait()
    functional().backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == 2


def test_a_parameter_of_no_module_is_found_out_though_others_gradients_come_first(adamw: AdamW) -> None:
    model, shift = layered(seed=1), nn.Parameter(torch.zeros(8))
    optimizer = adamw([*model.named_parameters(), ("shift", shift)], overlap_forward=True)
    came = []

    def backward() -> None:
        shifted = shift * 1.0
        (model(torch.ones(2, 8)) + shifted).sum().backward()

    for name, parameter in [*model.named_parameters(), ("shift", shift)]:
        parameter.register_hook(lambda _, name=name: came.append(name))
    backward()
    assert came[-1] == "shift"
    optimizer.step()
    with pytest.raises(ballast.Rejected, match="'shift' got a gradient.*no module's forward waited.*wait\\(\\)"):
        backward()
    optimizer.step()
    optimizer.wait()
    backward()
    optimizer.step()


def test_other_models_and_closed_optimizers_wait_for_nothing(adamw: AdamW) -> None:
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), overlap_forward=True)
    assert len(hooks) == before + 1
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    layered(seed=2)(torch.ones(2, 8))
    assert under_way(optimizer)
    optimizer.close()
    assert len(hooks) == before
    model(torch.ones(2, 8))


def test_a_compiled_model_has_the_same_weights(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    waits = adamw(model.named_parameters())
    overlaps = adamw(twin.named_parameters(), run=f"{waits.run}-twin", overlap_forward=True)
    twin(torch.ones(2, 8))  # its modules are known to be called, and will not be
    compiled = torch.compile(twin, backend="aot_eager")
    for _ in range(4):
        model(torch.ones(2, 8)).square().sum().backward()
        waits.step()
        compiled(torch.ones(2, 8)).square().sum().backward()
        overlaps.step()
    overlaps.wait()
    assert_close(model, twin)


def test_a_module_compiled_in_place_is_not_read_unawaited(adamw: AdamW) -> None:
    model = layered(seed=1)
    model.compile(backend="aot_eager")
    optimizer = adamw(model.named_parameters(), overlap_forward=True)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    with pytest.raises(ballast.Rejected, match="no module's forward waited.*wait\\(\\)"):
        model(torch.ones(2, 8)).square().sum().backward()
    optimizer.wait()
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == 2


READS: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "state_dict": lambda model: [value.clone() for value in model.state_dict().values()],
    "parameters": lambda model: [parameter.detach().clone() for parameter in model.parameters()],
    "a submodule's": lambda model: [p.detach().clone() for child in model.children() for p in child.parameters()],
    "copied": lambda model: list(copy.deepcopy(model).parameters()),
    "pickled": lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
    "averaged": lambda model: list(averaged(model).module.parameters()),
}


def averaged(model: nn.Module) -> torch.optim.swa_utils.AveragedModel:
    average = torch.optim.swa_utils.AveragedModel(layered(seed=2))
    average.update_parameters(model)
    return average


@pytest.mark.parametrize("read", READS)
def test_who_reads_weights_of_modules_gets_the_new_ones(read: str, adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    waits = adamw(model.named_parameters())
    overlaps = adamw(twin.named_parameters(), run=f"{waits.run}-twin", overlap_forward=True)
    for _ in range(3):
        for net, optimizer in ((model, waits), (twin, overlaps)):
            net(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
        expected, found = READS[read](model), READS[read](twin)
        assert same_bits([p.detach() for p in expected], [p.detach() for p in found])


def test_a_hook_within_backward_may_go_through_the_parameters(adamw: AdamW) -> None:
    """Which computes nothing again, whatever has its gradient by then."""
    model, twin = layered(seed=1), layered(seed=1)
    waits = adamw(model.named_parameters())
    overlaps = adamw(twin.named_parameters(), run=f"{waits.run}-twin", overlap_forward=True)
    found: list[list[str]] = []
    twin[0].weight.register_hook(lambda _: found.append([name for name, _ in twin.named_parameters()]))
    for _ in range(3):
        for net, optimizer in ((model, waits), (twin, overlaps)):
            net(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
    assert found == 3 * [[name for name, _ in model.named_parameters()]]
    overlaps.wait()
    assert same_bits(weights_of(model), weights_of(twin))


def test_torchs_own_methods_are_back_after_the_last_optimizer(none_open: None, adamw: AdamW) -> None:
    originals = nn.Module.state_dict, nn.Module.named_parameters, nn.Parameter.__deepcopy__
    one = adamw(layered(seed=1).named_parameters(), overlap_forward=True)
    assert nn.Module.state_dict is not originals[0]
    one.close()
    assert (nn.Module.state_dict, nn.Module.named_parameters, nn.Parameter.__deepcopy__) == originals


class Sums(nn.Module):
    """In evaluation it reads the weights of children that it calls in training."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            y: torch.Tensor = self.other(self.one(x))
            return y
        return F.linear(F.linear(x, self.one.weight, self.one.bias), self.other.weight, self.other.bias)


def evaluated(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What it makes after each of some steps."""
    made, x = [], torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        module.train()(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            made.append(module.eval()(x).clone())
    return made


@pytest.mark.parametrize("kind", ["sums", "encoder"])
def test_an_evaluation_waits_for_weights_that_a_module_reads_of_its_children(kind: str, adamw: AdamW) -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(256, 2, 256, dropout=0.0, batch_first=True)
    model = Sums() if kind == "sums" else nn.TransformerEncoder(layer, 2)
    twin = copy.deepcopy(model)
    waits = adamw(twin.named_parameters(), lr=0.1)
    overlaps = adamw(model.named_parameters(), lr=0.1, run=f"{waits.run}-overlaps", overlap_forward=True)
    assert same_bits(evaluated(model, overlaps), evaluated(twin, waits))


def test_a_step_without_a_gradient_waits_for_the_one_before(adamw: AdamW) -> None:
    model = perceptron(seed=1)
    optimizer = adamw(model.named_parameters(), overlap_forward=True)
    for step in range(1, 4):
        train_one(optimizer, model)
        optimizer.step()
        assert not under_way(optimizer)
    assert optimizer.step_was_skipped and optimizer.last_result is not None and optimizer.last_result.step == step


def train_one(optimizer: ballast.AdamW, model: nn.Module, factor: float = 1.0) -> None:
    points, labels = spirals(seed=1)
    loss = F.cross_entropy(model(points), labels) * factor
    loss.backward()
    optimizer.step(loss=loss)


@pytest.mark.parametrize("heard", ["step", "wait", "close", "zero_grad"])
def test_what_a_step_has_to_tell_is_told_later(heard: str, adamw: AdamW) -> None:
    model = perceptron(seed=1)
    optimizer = adamw(model.named_parameters(), overlap_forward=True, commit="staged")
    train_one(optimizer, model)
    with pytest.warns(UserWarning, match="step 2: the loss is not finite") as told:
        train_one(optimizer, model, factor=float("nan"))
        if heard == "zero_grad":
            model(spirals(seed=1)[0]).sum().backward()
            optimizer.zero_grad()
        train_one(optimizer, model) if heard in ("step", "zero_grad") else getattr(optimizer, heard)()
    assert not [one for one in told if "step 3" in str(one.message)]
    assert optimizer.spike_counts["nonfinite"] == 1
