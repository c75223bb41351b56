"""accelerate: a backend's name, and nothing else."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

import graphshard.integrations.accelerate  # accelerate knows the name from here on

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
)
accelerator = Accelerator(fsdp_plugin=plugin, dynamo_backend="graphshard")
model, optimizer = accelerator.prepare(model, optimizer)

losses = []
for step in range(4):
    torch.manual_seed(accelerator.num_processes * step + accelerator.process_index)
    tokens = torch.randint(128, (2, 16)).to(accelerator.device)
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
accelerator.print(losses)
