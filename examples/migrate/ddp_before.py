"""DDP, before: torchrun --nproc-per-node 2 examples/migrate/ddp_before.py"""

import torch
from torch.nn.parallel import DistributedDataParallel
from toy import MICRO, STEPS, Model, loss_of, report, save, start

device = start()
model = DistributedDataParallel(Model().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(STEPS):
    with model.no_sync():
        loss_of(model, MICRO * step, device).backward()
    loss = loss_of(model, MICRO * step + 1, device)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(f"loss {step}", loss)

save(model.module.state_dict())
