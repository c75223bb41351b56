"""Trainer: a backend's name, and nothing else."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import graphshard.integrations.accelerate  # Trainer compiles through accelerate

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )
)  # fmt: skip
tokens = torch.randint(128, (16, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    max_steps=4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    fsdp=True,
    fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    torch_compile_backend="graphshard",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=data,
)
trainer.train()

model = trainer.model
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
