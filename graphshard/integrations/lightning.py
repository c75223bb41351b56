"""Lightning's Trainer: what the module's `configure_model` has sharded is compiled, with options.

trainer = Trainer(..., callbacks=[GraphshardCallback(memory_budget="70GiB")])
"""

from __future__ import annotations

from typing import Any

from graphshard.integrations.required import require

require("lightning", (2, 4))  # the first with ModelParallelStrategy

from lightning import Callback  # noqa: E402


class GraphshardCallback(Callback):  # type: ignore[misc]
    """Compiles the module in place when a fit, a validation or a test begins; its `__call__` never
    runs, so each FSDP root in it is compiled instead, at its first call.

    options: those of `torch.compile(..., options=)`.
    """

    def __init__(self, **options: object) -> None:
        self._options = options

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if pl_module._compiled_call_impl is None:
            pl_module.compile(backend="graphshard", options=self._options)
