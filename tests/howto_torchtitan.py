"""In the place of `-m torchtitan.train`, which wants GPUs: its own parser reads the arguments."""

import sys
from unittest.mock import MagicMock

# Triton's kernels for mixtures of experts, where there is no Triton; and what writes figures.
for name in ("torchtitan.distributed.minimal_async_ep.kernels", "torch.utils.tensorboard"):
    sys.modules[name] = MagicMock()

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

sys.path.insert(0, "")
config = ConfigManager().parse_args()
layer = config.model_spec.model.layers[0]
# torchtitan refuses FlexAttention with a backend that is not torch's own.
assert not isinstance(layer.attention.inner_attention, FlexAttention.Config)
assert (config.compile.enable, config.compile.backend) == (True, "graphshard")
