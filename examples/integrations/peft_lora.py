"""PEFT: LoRA on a frozen base; what does not train is gathered, and never reduced."""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

device = torch.accelerator.current_accelerator() or torch.device("cpu")
dist.init_process_group()
torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )
)  # fmt: skip
config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = get_peft_model(base, config).to(device)
for layer in model.base_model.model.model.layers:
    fully_shard(layer)
fully_shard(model)
model.compile(backend="graphshard")

trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
losses = []
for step in range(4):
    drawn = torch.Generator().manual_seed(dist.get_world_size() * step + dist.get_rank())
    tokens = torch.randint(128, (2, 16), generator=drawn).to(device)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
