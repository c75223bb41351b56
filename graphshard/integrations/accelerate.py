"""accelerate, and what stands on it (Trainer, TRL), takes "graphshard" for a backend's name.

    import graphshard.integrations.accelerate

accelerate has the names of backends in an enum, which takes no others; this adds one to it. What
`accelerate launch --dynamo_backend` takes is in the launcher's own process:

    python -m graphshard.integrations.accelerate launch --dynamo_backend graphshard train.py

is `accelerate launch` with the name added; train.py needs the import too.
"""

from __future__ import annotations

from typing import Any

from graphshard.integrations.required import require

require("accelerate", (1, 6))  # the first with FSDP2

from accelerate.commands.config import config_utils  # noqa: E402
from accelerate.utils import DynamoBackend  # noqa: E402

NAME = "GRAPHSHARD"


def _add_name() -> None:
    """What the enum would hold if it had a line `GRAPHSHARD = "GRAPHSHARD"`."""
    if NAME in DynamoBackend.__members__:
        return
    member: Any = str.__new__(DynamoBackend, NAME)
    member._name_ = member._value_ = NAME
    DynamoBackend._member_names_.append(NAME)
    DynamoBackend._member_map_[NAME] = DynamoBackend._value2member_map_[NAME] = member
    config_utils.DYNAMO_BACKENDS.append(NAME)


_add_name()

if __name__ == "__main__":
    from accelerate.commands import launch
    from accelerate.commands.accelerate_cli import main

    launch.DYNAMO_BACKENDS = config_utils.DYNAMO_BACKENDS
    main()
