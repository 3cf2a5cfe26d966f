"""A small model with a tokenizer beside it, on the disk, for the verbs that run one."""

import json
from pathlib import Path

import torch
from texts import small_tokenizer

from fastbrain import TransformerConfig, TransformerLm
from fastbrain.formats.huggingface import generation_config_json

VOCAB = 600
CONTEXT = 48


def small_model(context: int = CONTEXT) -> TransformerLm:
    """One layer with fresh weights: it says anything."""
    config = TransformerConfig(
        vocab_size=VOCAB, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24,
        moe_layers=(), max_seq_len=context,
    )  # fmt: skip
    model = TransformerLm(config, seed=3)
    # fresh weights are small: a choice should be a clear one, and depend on all that came before
    with torch.no_grad():
        for weight in model.module.parameters():
            if weight.dim() > 1:
                weight.mul_(20)
    return model


def saved(folder: Path, context: int = CONTEXT, ends: tuple[int, ...] = ()) -> Path:
    """Its file in `folder`, with the tokenizer of `texts`; `ends` end a text beside id 0."""
    small_model(context).save_bin(folder / "model.rbw")
    (folder / "tokenizer.json").write_text(small_tokenizer().to_str())
    (folder / "generation_config.json").write_text(
        json.dumps(generation_config_json([0, *ends], 1))
    )
    return folder / "model.rbw"
