"""The models that `demo:NAME` names: one function each, called as a user's own function is.

Each returns a model sharded with `fully_shard` and the inputs of one step. It is called on the meta
device, so nothing is allocated. MODELS lists them.
"""

from __future__ import annotations

from graphshard.demo.llama import Config, Sharded, sharded

# Llama 3: arXiv 2407.21783, table 3.
LLAMA3_8B = Config(4_096, 32, 32, 14_336, recompute="selective")
LLAMA3_70B = Config(8_192, 80, 64, 28_672)
LLAMA3_405B = Config(16_384, 126, 128, 53_248)
# arXiv 2401.04088, table 1.
MIXTRAL_8X7B = Config(4_096, 32, 32, 14_336, vocabulary=32_000, num_experts=8)
# Planned in a few seconds, on any machine.
TINY_LLAMA = Config(256, 8, 8, 704, num_kv_heads=4, vocabulary=1_024, recompute="none")
TINY_MOE = Config(256, 4, 8, 512, 4, vocabulary=1_024, recompute="none", num_experts=4)


def llama3_8b(batch: int = 2, seq: int = 8_192) -> Sharded:
    return sharded(LLAMA3_8B, batch, seq)


def llama3_70b(batch: int = 1, seq: int = 8_192) -> Sharded:
    return sharded(LLAMA3_70B, batch, seq)


def llama3_405b(batch: int = 1, seq: int = 8_192) -> Sharded:
    return sharded(LLAMA3_405B, batch, seq)


def mixtral_8x7b(batch: int = 2, seq: int = 8_192) -> Sharded:
    return sharded(MIXTRAL_8X7B, batch, seq)


def tiny_llama(batch: int = 4, seq: int = 512) -> Sharded:
    return sharded(TINY_LLAMA, batch, seq)


def tiny_moe(batch: int = 4, seq: int = 512) -> Sharded:
    return sharded(TINY_MOE, batch, seq)


MODELS = {
    function.__name__: function
    for function in (llama3_8b, llama3_70b, llama3_405b, mixtral_8x7b, tiny_llama, tiny_moe)
}
