"""A configuration is right as a whole or refused with the key, the value, the rule, a way out."""

import re
import subprocess
import sys
import tomllib

import pytest

from fastbrain.config import LinearScaling, TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.training import config_files, resuming, rules, toml
from fastbrain.training.settings import Settings

BASE = """
[model]
d_model = 128
n_layers = 3
n_heads = 4
n_kv_heads = 2
head_dim = 32
d_ff = 352
moe_d_ff = 96
num_experts = 4
moe_layers = [1, 2]
max_seq_len = 512
[data]
train = "corpus.txt"
seq_len = 128
[train]
max_steps = 300
global_batch_size = 16
learning_rate = 3e-3
warmup_steps = 30
[save]
interval_steps = 100
"""

# overrides of a right configuration, and what a user then has to read
REFUSED = [
    # misspelled and misplaced
    ("train.learning_rat=1e-3", "train.learning_rat; did you mean train.learning_rate?"),
    ("train.lr=1e-3", "unknown setting train.lr; did you mean train.learning_rate?"),
    ("train.seq_len=64", "unknown setting train.seq_len; did you mean data.seq_len?"),
    ("model.n_head=4", "unknown setting model.n_head; did you mean model.n_heads?"),
    ("tran.seed=1", "unknown setting 'tran'; did you mean train?"),
    ("learning_rate=1e-3", "cannot set 'learning_rate': an override names its table"),
    ("train.seed", "cannot read 'train.seed': an override is written as table.key=value"),
    # of the wrong type
    ("train.learning_rate=fast", "train.learning_rate must be a number, got 'fast'"),
    ("train.learning_rate=true", "train.learning_rate must be a number, got true"),
    ("train.max_steps=10.5", "train.max_steps must be a whole number, got 10.5"),
    ("train.seed=true", "train.seed must be a whole number, got true"),
    ("data.train=7", "data.train must be text in quotes, got 7"),
    ("data.seq_len=\"64\"", "data.seq_len must be a whole number, got '64'"),
    ("train.betas=0.9", "train.betas must be two numbers like [0.9, 0.95], got 0.9"),
    ("model.moe_layers=1", "moe_layers must be a list or range of layer indices, got 1"),
    ("model.shared_expert=1", "shared_expert must be true or false, got 1"),
    ("model.d_model=\"big\"", "d_model must be a whole number, got 'big'"),
    ("save=3", "cannot set 'save': an override names its table"),
    # out of range
    ("train.learning_rate=0", "train.learning_rate must be above 0 and at most 10, got 0"),
    ("train.learning_rate=-1", "train.learning_rate must be above 0 and at most 10, got -1"),
    ("train.floor=1.5", "train.floor must be at least 0 and at most 1, got 1.5"),
    ("train.betas=[0.9, 1.0]", "train.betas must both be below 1, got [0.9, 1.0]"),
    ("train.max_norm=0", "train.max_norm must be above 0, got 0"),
    ("train.weight_decay=-0.1", "train.weight_decay must be at least 0 and at most 10, got -0.1"),
    ("data.seq_len=1", "data.seq_len must be from 2 to 2147483647, got 1"),
    ("data.seq_len=1e12", "data.seq_len must be from 2 to 2147483647, got 1000000000000"),
    ("save.keep=0", "save.keep must be from 1 to"),
    ("eval.interval=0", "eval.interval must be from 1 to"),
    ("train.seed=-1", "train.seed must be from 0 to 18446744073709551615, got -1"),
    ("model.d_model=0", "d_model must be above 0, got 0"),
    # not a number at all
    ("train.learning_rate=nan", "train.learning_rate must be a finite number, got nan"),
    ("train.max_norm=inf", "train.max_norm must be a finite number, got inf"),
    ("save.interval_min=nan", "save.interval_min must be a finite number, got nan"),
    ("model.rope_base=nan", "rope_base must be a finite number, got nan"),
    # not a choice
    ("train.precision=fp16", 'train.precision must be "f32" or "bf16-mixed", got \'fp16\''),
    ("train.micro_batch_size=max", 'micro_batch_size must be "auto" or a number, got \'max\''),
    (
        "guard.policy=ignore",
        'guard.policy must be "skip" or "rollback" or "stop", got \'ignore\'',
    ),
    ("train.max_time=90", 'train.max_time must be a time with its unit, like "90m"'),
    ("train.max_time=0s", 'train.max_time must be a time with its unit, like "90m"'),
    # against one another
    ("model.n_kv_heads=3", "n_heads must be a multiple of n_kv_heads"),
    ("model.n_layers=1", "moe_layers names layer 1, but n_layers is 1"),
    ("model.experts_per_token=9", "experts_per_token must be from 1 to num_experts, which is 4"),
    ("model.max_seq_len=100", "model.max_seq_len must be at least data.seq_len, which is 128"),
    ("train.max_steps=none", "and train.epochs; the configuration has none of them"),
    ("train.max_steps=5 train.max_tokens=5", "has train.max_steps and train.max_tokens"),
    ("train.epochs=2", "train.epochs is for data.kind instructions"),
    ("data.kind=poems", 'data.kind must be "text" or "instructions", got \'poems\''),
    ("data.kind=instructions", "instructions need a tokenizer that was trained before"),
    ("data.skip_bad=true", "data.skip_bad are for data.kind instructions"),
    ("data.skip_bad=1", "data.skip_bad must be true or false, got 1"),
    ("data.template=chat.jinja", "data.skip_bad are for data.kind instructions"),
    ("model.lora=8", "lora must be a table with rank, and perhaps alpha and seed, got 8"),
    ("model.lora={alpha=2}", "lora must be a table with rank"),
    ("model.lora={rank=0}", "lora.rank must be at least 1, got 0"),
    ("model.lora={rank=2,seed=-1}", "lora.seed must be from 0 to 2"),
    ("model.lora={rank=2,alpha=0}", "lora.alpha must be above 0, or the adapters do nothing"),
    ("model.lora={rank=2}", "model.lora trains adapters beside weights that are frozen"),
    ("model.max_seq_len=3000000", "max_seq_len must be at most 2,097,152"),
    ("model.lora={rank=2,alpha=true}", "alpha must be a finite number, got True"),
    ("train.warmup_steps=301", "must be at most the steps of the run, which are 300, got 301"),
    ("train.micro_batch_size=5", "which is 5; got 16, nearest: 15 and 20"),
    ("train.micro_batch_size=32", "which is 32; got 16, nearest: 32"),
    ("data.train=none", "data.train is missing: say which text to train on"),
    # a table in a table
    ("model.rope_scaling=linear", 'must be a table with rope_type "linear" or "llama3"'),
    ("model.rope_scaling={rope_type=\"linear\"}", "rope_scaling of this type has the keys factor"),
    ("model.rope_scaling={rope_type=\"linear\",factor=nan}", "factor must be a finite number"),
]  # fmt: skip


def tiny(*overrides: str) -> Settings:
    return Settings.from_tables(config_files.overridden(tomllib.loads(BASE), overrides))


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[each for each, _ in REFUSED])
def test_a_wrong_setting_is_refused_by_name_value_and_rule(overrides, message):
    with pytest.raises(InvalidConfig) as caught:
        tiny(*overrides.split(" ") if " train." in overrides else [overrides])
    assert message in str(caught.value)


def test_a_slip_is_answered_without_torch(tmp_path):
    """Nothing can have been allocated either."""
    (tmp_path / "tiny.toml").write_text(BASE)
    script = f"""
import sys
from fastbrain.cli import main
for override in {[each for each, _ in REFUSED]!r}:
    given = override.split(" ") if " train." in override else [override]
    code = main(["train", "tiny.toml", "--run", "run", *given])
    assert code == 2, override
assert main(["train", "tiny-cpu"]) == 2
assert main(["resume", "none"]) == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == len(REFUSED) + 2
    assert not (tmp_path / "run").exists()


def test_defaults_are_those_of_the_documentation():
    tables = Settings.from_tables({"data": {"train": "x"}, "train": {"max_steps": 1000}}).tables()
    assert tables["model"] == {}
    assert tables["data"] == {
        "train": "x", "validation": None, "tokenizer": None, "seq_len": 512,
        "kind": "text", "template": None, "skip_bad": False,
    }  # fmt: skip
    assert tables["train"] == {
        "init": None,
        "init_sha256": None,
        "max_steps": 1000,
        "max_tokens": None,
        "epochs": None,
        "epoch_rows": None,
        "global_batch_size": 32,
        "micro_batch_size": "auto",
        "learning_rate": 3e-4,
        "warmup_steps": None,
        "floor": 0.1,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
        "max_norm": 1.0,
        "precision": None,
        "seed": 42,
        "parallel": "auto",
        "max_time": None,
    }
    assert tables["save"] == {
        "interval_min": None, "interval_steps": None, "keep": 3, "keep_every": 0,
    }  # fmt: skip
    assert tables["eval"] == {"interval": 500, "samples": 2}
    assert tables["guard"] == {"policy": "skip"}


def test_what_is_left_open_follows_from_the_rest():
    settings = tiny("train.max_steps=1001", "train.warmup_steps=none", "save.interval_steps=none")
    assert settings.warmup == 21  # 2 %, rounded up
    assert settings.save_every_s == 900
    assert tiny("save.interval_steps=10").save_every_s is None
    assert tiny("save.interval_min=0.5").save_every_s == 30
    assert settings.config(300).vocab_size == 300
    assert tiny("model.vocab_size=500").config(300).vocab_size == 500
    assert settings.schedule().rate(20) == settings.train.learning_rate
    assert settings.schedule().rate(1001) == pytest.approx(0.1 * settings.train.learning_rate)


def test_positions_grow_with_the_rows_unless_they_are_given():
    bare = {"data": {"train": "x", "seq_len": 4096}, "train": {"max_steps": 1}}
    assert Settings.from_tables(bare).config(300).max_seq_len == 4096


def test_max_tokens_are_reached_and_replace_the_steps_of_the_file():
    settings = tiny("train.max_tokens=1e6")
    assert settings.train.max_steps is None
    assert settings.step_tokens == 16 * 128
    assert settings.steps == 489  # 488.3


def test_the_shipped_configurations_have_the_sizes_that_they_name():
    def counts(name: str, vocab_size: int) -> int:
        config = config_files.load(name, ["data.train=x"]).config(vocab_size)
        return config.parameter_counts().total

    assert config_files.shipped_names() == ["124m", "300m-moe-12gb", "30m", "sft", "tiny-cpu"]
    assert counts("300m-moe-12gb", 32_000) == 340_952_064
    assert counts("124m", 32_000) == 123_691_776
    assert counts("30m", 4_096) == 30_288_384
    assert 0.9e6 < counts("tiny-cpu", 4_096) < 1.3e6
    for name in config_files.shipped_names():
        with pytest.raises(InvalidConfig, match=r"data\.train is missing"):
            config_files.load(name)


def test_a_file_is_read_and_its_faults_are_placed(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('[data]\ntrain = "x"\n[train]\nmax_steps = 5\n')
    assert config_files.load(str(path), ["train.seed=7"]).train.seed == 7
    path.write_text("[data\n")
    with pytest.raises(InvalidConfig, match=r"own\.toml is not valid TOML: .*line 1"):
        config_files.load(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match="is not valid TOML"):
        config_files.load(str(path))
    with pytest.raises(InvalidConfig, match=r"there is no configuration 'nine': .* 124m"):
        config_files.load("nine")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("a.b=3e-4", 3e-4),
        ("a.b=none", None),
        ("a.b=true", True),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b = texts/one file.txt", "texts/one file.txt"),
        ("a.b=C:\\texts", "C:\\texts"),
        ('a.b="42"', "42"),
        ("a.b=x=y", "x=y"),
        ("a.b=1_000", 1000),
    ],
)
def test_an_override_is_toml_or_else_text(argument, value):
    assert toml.parse_override(argument) == ("a.b", value)


def test_what_is_written_reads_back():
    awkward = 'quote " backslash \\ tab \t line\n del \x7f snow \u2603 face \U0001f600'
    tables = {
        "run_id": "abc",
        "model": {"moe_layers": [1, 2], "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        "data": {"train": awkward, "seq_len": 64},
        "train": {"learning_rate": 1e-06, "peak": 3e16, "on": True, "betas": [0.9, 0.95]},
    }
    assert tomllib.loads(toml.dumps(tables)) == tables
    assert "gone" not in toml.dumps({"a": {"gone": None}})


def test_decided_settings_survive_their_file():
    config = TransformerConfig(rope_scaling=LinearScaling(4.0), moe_layers=(1, 2))
    settings = tiny("model.n_layers=8").with_model(config)
    again = Settings.from_tables(tomllib.loads(toml.dumps(settings.tables())))
    assert again.config(7) == config
    assert again.train == settings.train


@pytest.mark.parametrize(
    ("length", "seconds"), [("90s", 90), ("1.5m", 90), ("8h", 28_800), ("1d12h", 129_600)]
)
def test_lengths_of_time_have_units(length, seconds):
    assert rules.seconds(rules.duration("t", length)) == seconds


def decided(*overrides: str) -> Settings:
    settings = tiny("train.micro_batch_size=8", "train.precision=f32", *overrides)
    return settings.with_model(settings.config(300))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.seed=1", "train.seed was 42 and is now 1"),
        ("model.d_ff=64", "model.d_ff was 352 and is now 64"),
        ("model.vocab_size=301", "model.vocab_size was 300 and is now 301"),
        (
            "train.learning_rate=1",
            "train.learning_rate was 0.003 and is now 1.0. The learning rate at step 9 was 0.001 "
            "and is now 0.3333; at the end it was 0.0003 and is now 0.1. Leave it as it was, "
            "or say that you mean it: --override train.learning_rate=1.0",
        ),
        ("train.max_steps=301", "train.max_steps was 300 and is now 301"),
        ("train.global_batch_size=8", "train.global_batch_size was 16 and is now 8"),
        ("data.seq_len=64", "data.seq_len was 128 and is now 64"),
        ("train.precision=bf16-mixed", "train.precision was f32 and is now bf16-mixed"),
        ("data.tokenizer=t.json", "data.tokenizer was none and is now t.json"),
    ],
)
def test_a_run_does_not_go_on_as_another_one(override, named):
    with pytest.raises(InvalidConfig, match=re.escape(named)):
        resuming.continued(decided(), tiny(override), 9)


def test_what_only_watches_may_change_when_a_run_goes_on():
    wanted = tiny("eval.interval=7", "save.keep=9", "train.max_time=8h", "eval.samples=0")
    settings = resuming.continued(decided(), wanted, 9)
    assert (settings.eval.interval, settings.eval.samples, settings.save.keep) == (7, 0, 9)
    assert settings.train.max_time == "8h"
    # what the first start decided stays decided
    assert settings.train.micro_batch_size == 8
    assert settings.train.precision == "f32"
    assert settings.model["vocab_size"] == 300
    four = resuming.continued(decided(), tiny("train.micro_batch_size=4"), 9)
    assert four.train.micro_batch_size == 4


def test_what_decides_results_changes_only_by_name():
    wanted = tiny("train.learning_rate=1e-4", "train.betas=[0.8, 0.9]")
    with pytest.raises(InvalidConfig, match=r"--override train.betas=\[0.8,0.9\]$"):
        resuming.continued(decided(), wanted, 9, {"train.learning_rate"})
    both = {"train.learning_rate", "train.betas"}
    settings = resuming.continued(decided(), wanted, 9, both)
    assert settings.train.learning_rate == 1e-4
    said = resuming.changes(decided(), settings, 9)
    assert said[0] == "train.learning_rate was 0.003 and is now 0.0001"
    assert said[1] == "train.betas was [0.9,0.95] and is now [0.8,0.9]"
    assert said[2].startswith("The learning rate at step 9 was 0.001 and is now 3.333e-05;")
    # a seed is what makes a run what it is
    with pytest.raises(InvalidConfig, match=r"begin another run"):
        resuming.continued(decided(), tiny("train.seed=1"), 9, {"train.seed"})
