"""One of two ranks that Accelerate prepares, in its own process: accelerate_pair.py SERVER STORE, a file. The ranks' loaders
have 5 and 4 batches; 3 make a step, and the last one of an epoch is shorter. Prints what each batch of two epochs did, as
JSON."""

import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import ballast

ACCUMULATION = 3


def main() -> None:
    torch.set_num_threads(1)
    server, path = sys.argv[1:]
    world = int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(path, world)
    torch.distributed.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=world)
    loading = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, dataloader_config=loading)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = ballast.AdamW(model.named_parameters(), lr=1e-3, server=server, run="pair")
    loader = DataLoader(TensorDataset(torch.arange(72.0).reshape(9, 8)), batch_size=1)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    synchronized = []
    for epoch in range(2):
        for (batch,) in optimizer.in_step(tqdm(loader, disable=True) if epoch else loader):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                synchronized.append(accelerator.sync_gradients)
    told = {
        "batches": len(loader),
        "synchronized": synchronized,
        "steps": optimizer.last_result.step,
        "applied": optimizer.last_result.applied,
        "epochs": loader.iteration,
        "left": accelerator.gradient_state.in_dataloader,
    }
    optimizer.close()
    print(json.dumps(told), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
