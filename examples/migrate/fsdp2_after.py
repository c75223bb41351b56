"""Plain FSDP2, after: torchrun --nproc-per-node 2 examples/migrate/fsdp2_after.py"""

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from toy import MICRO, STEPS, Model, loss_of, report, save, start

device = start()
model = Model()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
model.compile(backend="graphshard")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(STEPS):
    model.set_requires_gradient_sync(False)
    loss_of(model, MICRO * step, device).backward()
    model.set_requires_gradient_sync(True)
    loss = loss_of(model, MICRO * step + 1, device)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(f"loss {step}", loss)

whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
save(get_model_state_dict(model, options=whole))
