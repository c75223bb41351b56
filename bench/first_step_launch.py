"""One rank of bench/first_step.py: a tiny model of transformers, and its first step.

In: name of the model and "graphshard" or "inductor" in argv; torchrun's environment. Out, on rank
0: the fields of `first_step.Launch` as JSON, the last line on stdout.
"""

from __future__ import annotations

import sys

del sys.path[0]  # bench/, whose modules have common names

import json  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

VOCAB, LENGTH = 128, 16
# What all of these configurations call alike.
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def bart(dropout: float = 0.1) -> torch.nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=64, dropout=dropout,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def gemma3() -> torch.nn.Module:
    own = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**DECODER, **own))


def deepseek_v3() -> torch.nn.Module:
    own = {
        "moe_intermediate_size": 16, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DECODER, **own))


def jamba() -> torch.nn.Module:
    own = {
        "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
        "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": 4, "use_mamba_kernels": False,
    }  # fmt: skip
    return transformers.JambaForCausalLM(transformers.JambaConfig(**DECODER, **own))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "bart": bart,
    # Commits before 2026-11-25 ran a model with dropout in eager FSDP2: no graph, no time.
    "bart_no_dropout": partial(bart, dropout=0.0),
    "gemma3": gemma3,
    "deepseek_v3": deepseek_v3,
    "jamba": jamba,
}


def main(name: str, way: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = MODELS[name]().train()
    if way == "graphshard":
        for module in list(model.modules()):
            if type(module).__name__.endswith(("DecoderLayer", "EncoderLayer")):
                fully_shard(module)
        fully_shard(model)
    model.compile(backend=way)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=drawn)
    kwargs = {} if name.startswith("bart") else {"use_cache": False}
    began = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens, **kwargs).loss
    loss.backward()
    found = {
        "first_s": time.perf_counter() - began,
        "loss": float(loss),
        "captured": 0,
        "groups": 0,
    }
    if way == "graphshard":
        import graphshard

        report = graphshard.explain(model)
        found |= {"captured": report.captured, "groups": report.present}
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
