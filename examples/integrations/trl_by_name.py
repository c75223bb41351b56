"""TRL: a backend's name, and nothing else."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import graphshard.integrations.accelerate  # TRL compiles through accelerate

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
words = {f"w{i}": i for i in range(126)} | {"[PAD]": 126, "[EOS]": 127}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[PAD]")),
    pad_token="[PAD]",
    eos_token="[EOS]",
)
rows = torch.randint(126, (16, 16), generator=torch.Generator().manual_seed(1)).tolist()
arguments = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=2,
    max_steps=4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    bf16=False,
    fsdp=True,
    fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    torch_compile_backend="graphshard",
    use_cpu=not torch.cuda.is_available(),
)
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"input_ids": rows}),
    processing_class=tokenizer,
)
trainer.train()

model = trainer.model
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
