"""Trainer: the model is compiled when training begins, with options.

    trainer = Trainer(..., callbacks=[GraphshardCallback(memory_budget="70GiB")])

By name alone, `TrainingArguments(torch_compile_backend="graphshard")` does it, after
`import graphshard.integrations.accelerate`.
"""

from __future__ import annotations

from typing import Any

from graphshard.integrations.required import require

require("transformers", (4, 51))

from transformers import TrainerCallback  # noqa: E402


class GraphshardCallback(TrainerCallback):  # type: ignore[misc]
    """Compiles the sharded model in place. options: those of `torch.compile(..., options=)`."""

    def __init__(self, **options: object) -> None:
        self._options = options

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        model.compile(backend="graphshard", options=self._options)
