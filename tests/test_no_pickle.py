"""A pickle runs whatever it says when it is read, so nothing here ever reads one, by any name."""

import ast
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import command, copied, relisted
from models import DENSE
from training_runs import entered

import fastbrain
from fastbrain import TokenFile, TransformerLm, cli, train
from fastbrain.commands import inspect, verify
from fastbrain.errors import FastBrainError

ROOT = Path(fastbrain.__file__).parent

MODULES = {
    "pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "joblib", "shelve",
    "marshal", "jsonpickle", "copyreg",
}  # fmt: skip
# of torch, of numpy, of pandas; and the collectives that pickle what they send
CALLS = {
    "torch.load", "torch.save", "torch.jit.load", "torch.package", "read_pickle", "to_pickle",
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip


def pickling(source: str) -> Iterator[str]:
    """What of a source could pickle or unpickle."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names):
                found = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute():
                found = [ast.unparse(node)]
            case ast.Call(keywords=keywords):
                allowed = [each for each in keywords if each.arg == "allow_pickle"]
                no = all(isinstance(e.value, ast.Constant) and not e.value.value for e in allowed)
                yield from [] if no else ["allow_pickle"]
                continue
            case _:
                continue
        for name in found:
            parts = name.split(".")
            if parts[0] in MODULES or any(
                name == each or name.endswith(f".{each}") for each in CALLS
            ):
                yield name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import dill as d",
        "from joblib import load",
        "import shelve, os",
        "from marshal import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch\nsave = torch.save",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
        "from torch.distributed import all_gather_object",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=some)",
        "def f():\n    import pickle",
    ],
)
def test_the_scan_finds(source):
    assert list(pickling(source))


def test_the_scan_lets_pass():
    assert not list(pickling("import json\njson.load(f)\nnp.load('x', allow_pickle=False)"))
    assert not list(pickling("lm.load_bin(path)\nlm.save_bin(path)"))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_package_pickles_nothing(path):
    assert not list(pickling(path.read_text()))


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def zipped(bomb: Bomb, path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps(bomb))
    return path.read_bytes()


FORMS = {
    "text": lambda bomb, _: pickle.dumps(bomb, protocol=0),
    "binary": lambda bomb, _: pickle.dumps(bomb, protocol=5),
    "zip": zipped,
}
NAMES = [
    "config.toml", "run.lock", "metrics.jsonl", "guard.jsonl",
    "data/corpus.json", "data/tokenizer.json", "data/train.bin", "data/train.bin.json",
    *(f"checkpoints/step-00000006/{name}" for name in (
        "model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json",
        "generation_config.json", "tokenizer.json", "tokenizer_config.json", "MANIFEST.json",
    )),
    "model.rbw", "model.opt",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Path]:
    """A folder with a run of six steps on text."""
    with entered(tmp_path_factory.mktemp("runs")) as folder:
        (folder / "corpus.txt").write_text("A pickle runs whatever it says when it is read. " * 300)
        overrides = ("data.train=corpus.txt", "model.vocab_size=none", "eval.samples=0")
        assert train.main(["tiny.toml", "--run", "whole", *overrides]) == 0
        yield folder


def test_a_bomb_goes_off(tmp_path):
    for protocol in (0, 5):
        target = tmp_path / str(protocol)
        pickle.loads(pickle.dumps(Bomb(target), protocol))
        assert target.is_dir()


LOADED = ("model.safetensors", "trainer_state.json", "tokenizer.json", "train.bin", "model.rbw")
CASES = [(n, f) for n in NAMES for f in FORMS if f == "binary" or n.endswith(LOADED)]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_pickle_by_any_name_is_never_read(runs, tmp_path, name, form, capsys):
    run = copied(runs / "whole", tmp_path / "run")
    target = tmp_path / "went-off"
    path = run / name
    path.write_bytes(FORMS[form](Bomb(target), tmp_path / "zip"))
    # a manifest that is right lets the loaders themselves see it
    if "checkpoints" in name and not name.endswith("MANIFEST.json"):
        relisted(path.parent)
    assert command(inspect, path) == 2 or name == "run.lock"
    assert "pickle" in capsys.readouterr().err
    codes = {command(inspect, run), command(verify, run), command(verify, run, "--json")}
    assert codes <= {0, 1, 2, 3}
    for read in (
        lambda: TokenFile.open(path, seed=1).close(),
        lambda: TransformerLm.load_bin(path),
        lambda: TransformerLm(DENSE).load_optimizer_state(path),
    ):
        with pytest.raises(FastBrainError):
            read()
    code = cli.main(["resume", str(run)])
    said = capsys.readouterr()
    assert code in (0, 2, 3), said
    assert "Traceback" not in said.err
    assert not target.exists()
