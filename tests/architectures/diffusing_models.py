"""Models of diffusers with random weights."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from architecture import DIM, ROWS, Architecture, Batch, generator, noise
from torch import Tensor, nn


def diffusing(kind: str, config: Mapping[str, Any]) -> nn.Module:
    import diffusers

    model: nn.Module = getattr(diffusers, kind)(**config)
    return model


def _moment(seed: int) -> Tensor:
    return torch.randint(0, 1000, (ROWS,), generator=generator(seed))


def noisy_images(seed: int) -> Batch:
    return {**noise("sample", 3, 16, 16, seed=seed), "timestep": _moment(seed)}


def prompted_images(seed: int) -> Batch:
    prompt = torch.randn(ROWS, 8, DIM, generator=generator(seed))
    latent = noise("sample", 4, 16, 16, seed=seed)
    return {**latent, "timestep": _moment(seed), "encoder_hidden_states": prompt}


def labelled_latents(seed: int) -> Batch:
    labels = torch.randint(0, 10, (ROWS,), generator=generator(seed))
    latent = noise("hidden_states", 4, 8, 8, seed=seed)
    return {**latent, "timestep": _moment(seed), "class_labels": labels}


DIFFUSERS = tuple(
    Architecture(
        kind, "diffusers", partial(diffusing, kind, config), batch, whole=kind.startswith("DiT")
    )
    for kind, batch, config in (
        (
            "UNet2DModel",
            noisy_images,
            {
                "sample_size": 16,
                "block_out_channels": (16, 32),
                "layers_per_block": 1,
                "norm_num_groups": 8,
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
                "attention_head_dim": 8,
            },
        ),
        (
            "UNet2DConditionModel",
            prompted_images,
            {
                "sample_size": 16,
                "block_out_channels": (16, 32),
                "layers_per_block": 1,
                "norm_num_groups": 8,
                "cross_attention_dim": DIM,
                "attention_head_dim": 8,
                "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            },
        ),
        (
            "DiTTransformer2DModel",
            labelled_latents,
            {
                "sample_size": 8,
                "num_layers": 3,
                "num_attention_heads": 4,
                "attention_head_dim": 8,
                "num_embeds_ada_norm": 10,
                "in_channels": 4,
                "out_channels": 4,
                "norm_num_groups": 8,
            },
        ),
        (
            "AutoencoderKL",
            partial(noise, "sample", 3, 16, 16),
            {
                "block_out_channels": (16, 32),
                "down_block_types": ("DownEncoderBlock2D",) * 2,
                "up_block_types": ("UpDecoderBlock2D",) * 2,
                "norm_num_groups": 8,
                "sample_size": 16,
            },
        ),
    )
)
