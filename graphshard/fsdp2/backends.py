"""What is known of a process group's backend, by its name."""

from __future__ import annotations

import torch
import torch.distributed as dist

# Backends that copy many tensors of one collective into one of their own, so that nothing is gained
# by handing them over where they are; gloo's corrupts the heap while several are under way (torch
# 2.13). Others are asked, and may say that they cannot.
COPYING_BACKENDS = ("gloo", "mpi", "ucc")
# They gather to a tensor of their own, and all-reduce a clone of what is to be reduced and
# scattered (torch 2.13, ProcessGroupGloo.cpp).
CLONING_BACKENDS = ("gloo",)


def backend_name(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """None where there is none: on one rank, and where the group itself is made in Python."""
    if group is None or group.size() == 1:
        return None
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:
        return None
