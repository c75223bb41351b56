"""FSDP1, after, the quick way: torchrun --nproc-per-node 2 examples/migrate/fsdp1_after.py"""

import torch
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from toy import MICRO, STEPS, Block, Model, loss_of, report, save, start

from graphshard.migrate import FullyShardedDataParallel as FSDP

device = start()
model = FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
model.compile(backend="graphshard")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(STEPS):
    with model.no_sync():
        loss_of(model, MICRO * step, device).backward()
    loss = loss_of(model, MICRO * step + 1, device)
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(f"loss {step}", loss)

whole = FullStateDictConfig(rank0_only=True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
    save(model.state_dict())
