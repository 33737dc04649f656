"""Lightning as its users write their modules."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from framework_setting import (
    ACCUMULATION,
    BATCHES,
    EPOCHS,
    FEW_EPOCHS,
    MAX_NORM,
    Kind,
    Loop,
    Options,
    Told,
    batches,
    language_model,
)


def trainer_of(options: Options, **more: Any) -> Any:
    import lightning.pytorch as lightning

    values: dict[str, Any] = dict(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(options.folder),
    )
    return lightning.Trainer(**{**values, **more})


def module_type(kind: Kind, told: Told) -> Any:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = language_model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def validation_step(self, batch: Any, index: int) -> None:
            told.losses.append(float(self.model(**batch).loss))

        def configure_optimizers(self) -> Any:
            optimizer = kind(self.named_parameters())
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, *_: Any) -> None:
            told.rates.append(self.lr_schedulers().get_last_lr()[0])

    return Module


def fit(module: Any, options: Options, told: Told, checkpoint: str | None = None, **more: Any) -> nn.Module:
    """checkpoint: where it goes on from. more: arguments of its Trainer."""
    told.watch(module.model)
    trainer = trainer_of(options, **{"accumulate_grad_batches": ACCUMULATION, "gradient_clip_val": MAX_NORM, **more})
    trainer.fit(module, batches(), ckpt_path=checkpoint)
    model: nn.Module = module.model
    return model


def lightning_loop(options: Options, kind: Kind, told: Told, **more: Any) -> nn.Module:
    return fit(module_type(kind, told)(), options, told, **more)


def lightning_bf16(options: Options, kind: Kind, told: Told) -> nn.Module:
    return lightning_loop(options, kind, told, precision="bf16-mixed")


def lightning_checkpoints(options: Options, kind: Kind, told: Told) -> nn.Module:
    """Saves every few steps, is stopped within an epoch, and goes on from what it saved last."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(options.folder, every_n_train_steps=5, save_last=True)
    return lightning_loop(
        options,
        kind,
        told,
        checkpoint="last" if options.resume else None,
        callbacks=[saving],
        enable_checkpointing=True,
        max_steps=options.stop_after or -1,
    )


def lightning_average(options: Options, kind: Kind, told: Told) -> nn.Module:
    """Lightning's own average of the weights takes their place while it is validated, and at the end."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    module = module_type(kind, told)()
    module.val_dataloader = batches
    return fit(module, options, told, max_epochs=FEW_EPOCHS, callbacks=[EMAWeightAveraging(decay=0.9)])


def lightning_gan(options: Options, kind: Kind, told: Told) -> nn.Module:
    """Two optimizers, stepped by hand, of which each sees the gradients of its own parameters alone."""
    return two_nets(options, kind, told, toggled=True)


def lightning_gan_untoggled(options: Options, kind: Kind, told: Told) -> nn.Module:
    """The generator's loss makes gradients of the critic too, which zero_grad() drops."""
    return two_nets(options, kind, told, toggled=False)


def two_nets(options: Options, kind: Kind, told: Told, toggled: bool) -> nn.Module:
    import lightning.pytorch as lightning

    torch.manual_seed(2)
    random = torch.Generator().manual_seed(5)

    class Nets(lightning.LightningModule):  # type: ignore[misc]
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
            self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))

        def configure_optimizers(self) -> Any:
            run = kind.values.get("run")
            return [kind(net.named_parameters(), run=f"{run}-{name}") for name, net in self.named_children()]

        def training_step(self, real: Any, index: int) -> None:
            generator, critic = self.optimizers()
            with self.toggled_optimizer(generator) if toggled else nullcontext():
                fake = self.generator(torch.randn(len(real), 4, generator=random))
                generator.zero_grad()
                self.learn(generator, self.loss(fake, real=True))
            with self.toggled_optimizer(critic) if toggled else nullcontext():
                critic.zero_grad()
                self.learn(critic, self.loss(real, real=True) + self.loss(fake.detach(), real=False))

        def loss(self, samples: torch.Tensor, real: bool) -> torch.Tensor:
            verdicts = self.critic(samples)
            return nn.functional.binary_cross_entropy_with_logits(verdicts, torch.full_like(verdicts, float(real)))

        def learn(self, optimizer: Any, loss: torch.Tensor) -> None:
            told.losses.append(float(loss.detach()))
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")
            optimizer.step()

    nets = Nets()
    samples = torch.randn(4 * BATCHES, 8, generator=random) + 2
    trainer = trainer_of(options, max_epochs=FEW_EPOCHS)
    trainer.fit(nets, torch.utils.data.DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    return nets


# --- what a ballast optimizer refuses --------------------------------------------------------------------------------


def lightning_clips_values(options: Options, kind: Kind, told: Told) -> nn.Module:
    return lightning_loop(options, kind, told, gradient_clip_algorithm="value")


def lightning_looks_at_gradients(options: Options, kind: Kind, told: Told) -> nn.Module:
    """The norm of each gradient, as Lightning computes it for its log."""
    from lightning.pytorch.utilities import grad_norm

    module_here = module_type(kind, told)

    class Looking(module_here):  # type: ignore[misc, valid-type]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self.model, norm_type=2))

    return fit(Looking(), options, told)


LIGHTNING_LOOPS: list[Loop] = [
    lightning_loop,
    lightning_bf16,
    lightning_checkpoints,
    lightning_average,
    lightning_gan,
    lightning_gan_untoggled,
    lightning_clips_values,
    lightning_looks_at_gradients,
]
