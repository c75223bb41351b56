"""A script for `run_script.py`: what users of Trainer turn on, all at once, and a second run that
goes on from what the first one saved.

FROM: the folder with the checkpoint to go on from; without it, what is saved stands in `out`.
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import graphshard.integrations.accelerate  # noqa: F401

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
start = os.environ.get("FROM")
tokens = torch.randint(128, (32, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=4,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=2,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    max_grad_norm=0.1,
    gradient_checkpointing=True,
    bf16=True,
    report_to=[],
    fsdp=True,
    fsdp_config={
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    },
    torch_compile_backend="graphshard",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model=LlamaForCausalLM(config), args=arguments, train_dataset=data, eval_dataset=data[:8]
)
trainer.train(resume_from_checkpoint=start)

model = trainer.model
model.eval()
with torch.no_grad():
    said = model.generate(tokens[:2, :4], max_new_tokens=4, do_sample=False)
history = trainer.state.log_history
keys = ("loss", "eval_loss", "grad_norm", "learning_rate")
losses = [[row.get(key) for key in keys] for row in history] + said.tolist()
