"""Models of transformers with random weights, each small by a configuration of its own."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from architecture import (
    DIM,
    IMAGE,
    VOCAB,
    Architecture,
    Batch,
    both_sides,
    images,
    noise,
    pairs,
    sound,
    tokens,
)
from torch import nn

SMALL: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
SMALL_IMAGE: Mapping[str, Any] = {
    "hidden_size": DIM,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": IMAGE,
    "patch_size": 8,
}


def hugging(kind: str, head: str, config: Mapping[str, Any]) -> nn.Module:
    """head: an `AutoModel...` class."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind](**config, attn_implementation="eager")
    if hasattr(made, "use_cache"):
        made.use_cache = False
    model: nn.Module = getattr(transformers, head).from_config(made)
    return model


def _hugging(
    kind: str,
    head: str,
    batch: Callable[[int], Batch],
    config: Mapping[str, Any],
    whole: bool = False,
) -> Architecture:
    build = partial(hugging, kind, head, config)
    return Architecture(kind, "transformers", build, batch, whole)


def decoder(kind: str, **config: Any) -> Architecture:
    return _hugging(kind, "AutoModelForCausalLM", tokens, {**SMALL, **config})


def encoder(kind: str, *, whole: bool = False, **config: Any) -> Architecture:
    return _hugging(kind, "AutoModelForMaskedLM", tokens, {**SMALL, **config}, whole)


def seq2seq(kind: str, **config: Any) -> Architecture:
    return _hugging(kind, "AutoModelForSeq2SeqLM", both_sides, config)


def vision(kind: str, **config: Any) -> Architecture:
    return _hugging(kind, "AutoModel", images, config)


def audio(kind: str, batch: Callable[[int], Batch] = sound, **config: Any) -> Architecture:
    return _hugging(kind, "AutoModel", batch, config)


GROUPED = {"num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, **GROUPED}
BOTH = {
    "vocab_size": VOCAB,
    "d_model": DIM,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": DIM,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
STAGES = {"image_size": IMAGE, "depths": [2, 2], "num_channels": 3}
SPEECH = {
    "hidden_size": DIM,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "vocab_size": VOCAB,
}
TWO_TOWERS = {
    "text_config": {**SMALL, "projection_dim": DIM, "eos_token_id": 2, "bos_token_id": 1},
    "vision_config": {**SMALL_IMAGE, "projection_dim": DIM},
    "projection_dim": DIM,
}

DECODERS = (
    decoder("llama", **GROUPED),
    decoder("mistral", **GROUPED, sliding_window=8),
    decoder("mixtral", **EXPERTS),
    decoder("qwen2", **GROUPED),
    decoder("qwen3", **GROUPED, head_dim=8),
    decoder("qwen2_moe", **EXPERTS, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    decoder("qwen3_moe", **EXPERTS, moe_intermediate_size=16, head_dim=8),
    decoder("gemma", **GROUPED, head_dim=8),
    decoder("gemma2", **GROUPED, head_dim=8, sliding_window=8),
    decoder("gemma3_text", **GROUPED, head_dim=8, sliding_window=8),
    decoder("phi"),
    decoder("phi3", pad_token_id=0),
    decoder("gpt2"),
    decoder("gpt_neo", attention_types=[[["global", "local", "global"], 1]], num_layers=3),
    decoder("gpt_neox"),
    decoder("gptj", rotary_dim=4),
    decoder("gpt_bigcode"),
    decoder("gpt_oss", **EXPERTS, head_dim=8, sliding_window=8),
    decoder("opt", ffn_dim=48, word_embed_proj_dim=DIM),
    decoder("bloom"),
    decoder("falcon", num_kv_heads=2),
    decoder("mpt", d_model=DIM, n_heads=4, n_layers=3),
    decoder("codegen", n_ctx=64, rotary_dim=4),
    decoder("stablelm", **GROUPED),
    decoder("olmo"),
    decoder("olmo2"),
    decoder("olmoe", **EXPERTS),
    decoder("cohere", **GROUPED),
    decoder("starcoder2", **GROUPED),
    decoder("granite", **GROUPED),
    decoder("nemotron", **GROUPED, head_dim=8),
    decoder("persimmon"),
    decoder("smollm3", **GROUPED, pad_token_id=0),
    decoder("glm", **GROUPED, head_dim=8, pad_token_id=0),
    decoder("xglm", d_model=DIM, ffn_dim=48, num_layers=3, attention_heads=4),
    decoder(
        "deepseek_v3",
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=4,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    decoder("mamba", state_size=4),
    decoder("mamba2", state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    decoder("rwkv", attention_hidden_size=DIM, context_length=64),
    decoder("recurrent_gemma", lru_width=DIM, attention_window_size=8),
)

ENCODERS = (
    encoder("bert"),
    encoder("roberta"),
    encoder("distilbert", dim=DIM, n_layers=3, n_heads=4, hidden_dim=48),
    encoder("albert", embedding_size=16),
    encoder("electra", embedding_size=16),
    encoder("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder(
        "modernbert",
        global_attn_every_n_layers=2,
        local_attention=8,
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    encoder("mpnet"),
    encoder("convbert", embedding_size=16),
    encoder("roformer", embedding_size=DIM),
    encoder("squeezebert", whole=True, embedding_size=DIM),
    encoder("fnet"),
    encoder("nystromformer", num_landmarks=4, segment_means_seq_len=16),
    encoder("big_bird", attention_type="original_full"),
    encoder("longformer", attention_window=8),
    encoder("xlm-roberta"),
)

PAIRS = (
    seq2seq("t5", **T5),
    seq2seq("umt5", **T5),
    seq2seq("longt5", **T5, local_radius=4),
    seq2seq("bart", **BOTH),
    seq2seq("mbart", **BOTH),
    seq2seq("pegasus", **BOTH),
    seq2seq("marian", **BOTH, pad_token_id=0, decoder_start_token_id=0),
    seq2seq("blenderbot", **BOTH),
)

VISION = (
    vision("vit", **SMALL_IMAGE),
    vision("deit", **SMALL_IMAGE),
    vision("beit", **SMALL_IMAGE),
    vision("dinov2", **SMALL_IMAGE),
    vision("vit_mae", **SMALL_IMAGE),
    vision("swin", **STAGES, patch_size=2, embed_dim=16, num_heads=[2, 4], window_size=4),
    vision("swinv2", **STAGES, patch_size=2, embed_dim=16, num_heads=[2, 4], window_size=4),
    vision("convnext", num_channels=3, hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
    vision("convnextv2", num_channels=3, hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
    vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2]),
    vision("regnet", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], groups_width=4),
    vision(
        "segformer",
        num_encoder_blocks=2,
        depths=[2, 2],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    vision(
        "poolformer",
        depths=[2, 2],
        hidden_sizes=[8, 16],
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
    ),
    vision("mobilenet_v2", image_size=IMAGE, depth_multiplier=0.25),
)

SOUND = (
    audio("wav2vec2", **SPEECH),
    audio("hubert", **SPEECH),
    audio(
        "audio-spectrogram-transformer",
        partial(noise, "input_values", 32, 16),
        **{**SMALL_IMAGE, "max_length": 32, "num_mel_bins": 16},
    ),
)

TOWERS = (
    _hugging("clip", "AutoModel", pairs, TWO_TOWERS),
    _hugging("siglip", "AutoModel", pairs, TWO_TOWERS),
)
