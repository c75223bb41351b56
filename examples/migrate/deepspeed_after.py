"""DeepSpeed ZeRO-3, after: torchrun --nproc-per-node 2 examples/migrate/deepspeed_after.py"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from toy import MICRO, STEPS, Model, loss_of, report, save, start

device = start()
with torch.device("meta"):  # as zero.Init: no rank holds the whole model
    model = Model()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
model.to_empty(device=device)
weights = Model().state_dict() if dist.get_rank() == 0 else {}  # or from a file
broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, weights, options=broadcast)
model.compile(backend="graphshard")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(STEPS):
    for micro in range(MICRO):
        model.set_requires_gradient_sync(micro == MICRO - 1)
        loss = loss_of(model, MICRO * step + micro, device)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(f"loss {step}", loss)

whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
save(get_model_state_dict(model, options=whole))
