"""Random EAGLE-3 heads for tiny targets."""

import torch

from compressor.train.eagle3 import Eagle3Head, HeadShape


def random_head(decoder, *, norm_before_residual=True, aux=(1, 2, 4), size=150):
    config = decoder.config
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(decoder.vocab_size, generator=generator)[:size].sort().values
    shape = HeadShape(
        hidden_size=config.hidden_size,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=decoder.vocab_size,
        draft_vocab_size=size,
        aux=aux,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_position_embeddings=512,
        norm_before_residual=norm_before_residual,
    )
    head = Eagle3Head(shape, decoder.embedding.weight.detach(), ids)
    with torch.no_grad():
        for value in head.parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_((noise * 0.3 if value.ndim == 2 else 1 + noise * 0.2).bfloat16())  # what export stores exactly
    return head
