"""Run with a Python that has llama_cpp: what llama.cpp makes of a GGUF file.

Given the file and a JSON file of {"ids": rows of one length, "texts": [...]}, writes logits.npy
(rows, length, V) and tokens.json, the ids of the texts, into a folder.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

path, asked, folder = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
length = max(len(ids) for ids in asked["ids"])
model = llama_cpp.Llama(
    path,
    n_ctx=length,
    n_batch=length,
    n_threads=1,
    n_gpu_layers=0,
    logits_all=True,
    verbose=False,
    # a cache of FP16, the default, costs three digits
    type_k=llama_cpp.GGML_TYPE_F32,
    type_v=llama_cpp.GGML_TYPE_F32,
)
logits = []
for ids in asked["ids"]:
    model.reset()
    model.eval(ids)
    logits.append(np.array(model.scores[: len(ids)]))
np.save(folder / "logits.npy", np.stack(logits))
tokens = [
    model.tokenize(text.encode(), add_bos=False, special=asked["special"])
    for text in asked["texts"]
]
(folder / "tokens.json").write_text(json.dumps(tokens))
