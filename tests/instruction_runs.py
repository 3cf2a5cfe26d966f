"""Small models to fine-tune, with tokenizers, and instructions that they can learn."""

import json
from pathlib import Path

from fastbrain import TransformerConfig, TransformerLm
from fastbrain.tokens.tokenizer import END_OF_TEXT, PAD, train_tokenizer
from fastbrain.tokens.tokenizer_files import TokenizerFiles

WORDS = (
    "red", "blue", "green", "black", "white", "gray", "pink", "brown",
    "gold", "plum", "teal", "lime", "rust", "jade", "ruby", "sand",
)  # fmt: skip
VOCAB = 300


def files() -> TokenizerFiles:
    texts = [f"user\nassistant\nsystem\nSay {word} twice. {word} {word}." for word in WORDS]
    return TokenizerFiles(train_tokenizer(texts * 3, VOCAB), END_OF_TEXT, PAD)


def base(folder: Path, moe: bool = False) -> Path:
    """A directory with an untrained model and its tokenizer; returns its path."""
    words = files()
    config = TransformerConfig(
        vocab_size=words.size + 4,
        d_model=32,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        d_ff=48,
        moe_d_ff=16,
        num_experts=3,
        experts_per_token=2,
        moe_layers=(1,) if moe else (),
        max_seq_len=64,
    )
    return TransformerLm(config, seed=3).save_pretrained(folder, words)


def pairs(path: Path, count: int = 48) -> Path:
    """`count` requests to say a word twice, as lines of prompt and response."""
    rows = [
        {"prompt": f"Say {word} twice.", "response": f"{word} {word}."}
        for word in (WORDS * count)[:count]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
