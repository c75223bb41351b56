"""A user's script: one replica of a torchft job, compiled, with eager FSDP2 beside it.

`torchrun ... replica.py 100` takes 100 steps with whichever replicas there are. torchft averages
gradients over replicas in FSDP2's all-reduce hook. Eager FSDP2 is given what the replicas came to
for the same gradients, so that both stay equal to the last bit in each replica, whoever comes and
goes.
"""

import hashlib
import sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torchft import Manager, ProcessGroupGloo

LIMIT = timedelta(seconds=20)


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def shards(*models: nn.Module) -> list[Tensor]:
    return [param.to_local().detach() for model in models for param in model.parameters()]


def load(models: list[nn.Module], saved: list[Tensor]) -> None:
    for own, other in zip(shards(*models), saved, strict=True):
        own.copy_(other)


def main(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    models = oracle, model = [sharded(), sharded()]
    model.compile(backend="graphshard", options={"compute": "aten", "fallback": "error"})
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=partial(load, models),
        state_dict=lambda: shards(*models),
        min_replica_size=1,
        timeout=LIMIT,
        hostname="localhost",
    )
    reduced: dict[str, tuple[Tensor, Tensor]] = {}

    def reduce(name: str, output: Tensor) -> None:
        own = output.clone()
        manager.allreduce(output).wait()
        reduced[name] = own, output.clone()

    def replay(name: str, output: Tensor) -> None:
        own, whole = reduced.pop(name)
        assert torch.equal(output, own), f"gradients of {name} differ"
        output.copy_(whole)

    for which, hook in ((model, reduce), (oracle, replay)):
        for name, block in which.named_children():
            block.set_all_reduce_hook(partial(hook, name))
    optimizers = [torch.optim.SGD(which.parameters(), lr=0.1) for which in models]

    while manager.current_step() < steps:
        manager.start_quorum()
        torch.manual_seed(manager.current_step())
        batch = torch.randn(4, 8)
        for which in (model, oracle):
            which(batch).square().mean().backward()
        committed = manager.should_commit()
        for optimizer in optimizers:
            if committed:
                optimizer.step()
            optimizer.zero_grad()
        theirs, ours = shards(oracle), shards(model)
        assert all(map(torch.equal, theirs, ours)), "parameters differ"
        if committed and dist.get_rank() == 0:
            digest = hashlib.sha256(b"".join(own.numpy().tobytes() for own in ours)).hexdigest()
            step, count = manager.current_step(), manager.num_participants()
            print(f"step {step} of {count}: {digest}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
