"""`fastbrain inspect` on what goes in and out: adapters, packed instructions, GGUF models."""

import json

import numpy as np
import pytest
from fixture_models import FIXTURES
from made_runs import command

from fastbrain import TransformerLm
from fastbrain.commands import inspect
from fastbrain.formats.gguf_write import write_gguf
from fastbrain.tokens.packed_file import BEGIN, PADDING, TARGET


@pytest.fixture
def ask(capsys):
    """Inspect a path; returns the exit code and the document."""

    def asked(path) -> tuple[int, dict]:
        code = command(inspect, path, "--json")
        return code, json.loads(capsys.readouterr().out)

    return asked


def test_an_adapter_file(tmp_path, ask):
    lm = TransformerLm.load_bin(FIXTURES / "lora_dense" / "with_adapter.rbw")
    path = tmp_path / "x.rbl"
    lm.save_lora(path)
    code, found = ask(path)
    assert (code, found["whole"]) == (0, True)
    assert found["what"] == "LoRA adapters of the reference format (.rbl), F32"
    assert found["adapter"] == {"rank": 4, "alpha": 8.0, "seed": 3}
    assert found["parameters"] == {"total": 9_792}
    assert found["tensor_count"] == len(lm.adapters())
    path.write_bytes(path.read_bytes()[:-1])
    code, found = ask(path)
    assert code == 1
    assert "cut short" in found["fault"]


def test_weights_with_an_adapter(ask):
    code, found = ask(FIXTURES / "lora_moe_shared" / "with_adapter.rbw")
    assert code == 0
    assert found["adapter"] == {"rank": 4, "alpha": 8.0, "seed": 3}


def test_packed_instructions(tmp_path, ask):
    path = tmp_path / "rows.packed"
    words = [BEGIN | 5, 6, TARGET | 7, BEGIN | 8, TARGET | 9, PADDING]
    np.array(words, "<u4").tofile(path)
    code, found = ask(path)
    assert (code, found["whole"]) == (0, None)
    counts = {name: found[name] for name in ("words", "tokens", "documents", "targets")}
    assert counts == {"words": 6, "tokens": 5, "documents": 2, "targets": 2}
    with path.open("ab") as file:
        file.write(b"x")
    assert ask(path)[0] == 1


def test_a_gguf_model(tmp_path, ask):
    pytest.importorskip("gguf")
    lm = TransformerLm.load_bin(FIXTURES / "dense" / "trained.rbw")
    path = tmp_path / "x.gguf"
    write_gguf(path, lm.config, lm.weights())
    code, found = ask(path)
    assert (code, found["whole"], found["what"]) == (0, True, "a GGUF model")
    assert found["parameters"]["total"] == lm.parameter_counts().total
    path.write_bytes(path.read_bytes()[:2000])
    assert ask(path)[0] == 1
