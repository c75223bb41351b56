"""A model file of your own, to plan without weights:

    graphshard plan examples/llama.py:llama3_3b --world 64 --hw h100-ib400

A function returns a model sharded with `fully_shard` and the inputs of one step. It is called on
the meta device, so nothing is allocated. The model here is the one behind `demo:llama3_8b`
(graphshard/demo/llama.py) in another shape; in its place stands any model of yours.
"""

from graphshard.demo.llama import Config, Sharded, sharded
from graphshard.demo.models import llama3_8b, llama3_70b, llama3_405b, mixtral_8x7b

__all__ = ["llama3_3b", "llama3_8b", "llama3_70b", "llama3_405b", "mixtral_8x7b"]

# The shapes of Llama 3.2 3B, with a head of its own.
LLAMA3_3B = Config(3_072, 28, 24, 8_192, recompute="selective")


def llama3_3b(batch: int = 2, seq: int = 8_192) -> Sharded:
    return sharded(LLAMA3_3B, batch, seq)
