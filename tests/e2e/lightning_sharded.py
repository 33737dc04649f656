"""Lightning's ModelParallelStrategy, whose module shards itself by fully_shard, as one of the ranks that torchrun starts:
lightning_sharded.py SERVER FOLDER. Trains with ballast's AdamW, stops in the middle, goes on from Lightning's checkpoint
in a new Trainer, and does the same with torch's. Rank 0 prints, as JSON, what each optimizer's training told."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from framework_setting import Kind, batches, language_model

ACCUMULATION, STOP, STEPS = 2, 10, 20


class Sharded(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, kind: Kind, told: dict[str, list[float]]):
        super().__init__()
        self._kind, self._told = kind, told
        self.model = language_model()

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(**batch).loss
        self._told["losses"].append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return self._kind(self.named_parameters())


def trained(kind: Kind, folder: Path) -> dict[str, Any]:
    told: dict[str, list[float]] = {"losses": []}
    checkpoint = None
    for steps in (STOP, STEPS):
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1),
            max_steps=steps,
            accumulate_grad_batches=ACCUMULATION,
            gradient_clip_val=0.25,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Sharded(kind, told)
        trainer.fit(module, batches(), ckpt_path=checkpoint)
        checkpoint = str(folder / f"{kind.type.__module__.split('.')[0]}.ckpt")
        trainer.save_checkpoint(checkpoint)
    weights: nn.Module = module.model
    ends = {name: p.detach().full_tensor().double().norm().item() for name, p in weights.named_parameters()}
    return {**told, "ends": ends}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    server, folder = sys.argv[1], Path(sys.argv[2])
    told = {}
    for name in ("ballast", "torch"):
        kind = Kind(argparse.Namespace(kind=name, server=server), "lightning_sharded")
        told[name] = trained(kind, folder)
    if distributed.get_rank() == 0:
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
