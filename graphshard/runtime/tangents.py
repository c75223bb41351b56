"""Which of a graph's outputs the loss really used, learned when backward reaches the graph.

AOTAutograd fills the gradient of an unused output with zeros. Eager FSDP2 leaves parameters that
hang on it alone (`.grad` stays None), so backward has to know what was missing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

ALL_DEFINED = -1  # every bit set: nothing is missing


class TangentMask:
    """One graph's tangents. `positions[k]` is the place of tangent k among the graph outputs."""

    def __init__(self, positions: tuple[int, ...]) -> None:
        self._positions = positions
        self._mask = ALL_DEFINED

    @property
    def needed(self) -> bool:
        """With one tangent, backward runs only if it is there."""
        return len(self._positions) > 1

    def watch(self, outputs: Any) -> None:
        """Look at the gradients that arrive at the autograd node which made `outputs`."""
        for output in outputs:
            node = output.grad_fn if isinstance(output, Tensor) else None
            if node is not None and node.name() == "CompiledFunctionBackward":
                node.register_prehook(self._see)
                return

    def take(self) -> int:
        """Bit k is set if tangent k arrived. Valid once, for the backward that runs now."""
        mask, self._mask = self._mask, ALL_DEFINED
        return mask

    def _see(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._mask = sum(
            1 << bit
            for bit, position in enumerate(self._positions)
            if position >= len(gradients) or gradients[position] is not None
        )
