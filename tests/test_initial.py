"""A run that begins from a model has its weights and its shape, and counters of its own."""

import pytest
import torch
from fixture_models import FIXTURES, assert_same_bits

from fastbrain import Precision, TokenBatch, TransformerLm
from fastbrain.errors import InvalidConfig
from fastbrain.training import config_files, initial
from fastbrain.training.settings import Settings

# a model of 64 positions after 20 updates, with an optimizer of its own
TRAINED = FIXTURES / "dense" / "trained.rbw"


def wanted(*overrides: str) -> Settings:
    tables = {
        "data": {"train": "corpus.bin", "seq_len": 16},
        "train": {"init": str(TRAINED), "max_steps": 1, "learning_rate": 1e-3},
    }
    return Settings.from_tables(config_files.overridden(tables, overrides))


def begun(*overrides: str) -> tuple[TransformerLm, TransformerLm]:
    """The model that a run begins from, and the one that it begins with."""
    settings = wanted(*overrides)
    base = initial.open_base(settings).model
    return base, initial.build(initial.inherit(settings, base), base)


@pytest.mark.parametrize(
    "override", ["model.max_seq_len=96", "model.rope_base=500.0", "model.aux_loss_weight=0.5"]
)
def test_another_rotary_table_stands_before_the_same_weights(override):
    base, model = begun(override)
    assert model.config != base.config
    assert_same_bits(model.weights(), TransformerLm.load_bin(TRAINED).weights())


def test_positions_past_those_of_the_base_can_be_read():
    _, model = begun("model.max_seq_len=96")
    assert model.config.max_seq_len == 96
    assert model.module(torch.zeros(1, 96, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize("more", [[], ["model.max_seq_len=96"]])
def test_weights_that_were_rounded_are_told_of_before_the_first_update(tmp_path, more):
    path = tmp_path / "small.rbw"
    TransformerLm.load_bin(TRAINED).save_bin(path, Precision.Q8)
    _, model = begun(f"train.init={path}", *more)
    with pytest.warns(UserWarning, match=rf"training on from {path}, whose weights were rounded"):
        model.train_step_batch(TokenBatch([[1, 2, 3]]))


def test_the_base_itself_is_trained_where_the_shapes_agree():
    base, model = begun()
    assert model is base


def test_updates_count_from_zero_with_the_optimizer_of_the_run():
    assert TransformerLm.load_bin(TRAINED).optimizer_step() == 20
    _, model = begun("train.weight_decay=0.25", "train.betas=[0.8, 0.9]")
    assert model.optimizer_step() == 0
    assert model.optimizer.learning_rate == 1e-3
    assert model.optimizer.weight_decay == 0.25
    assert model.optimizer.betas == (0.8, 0.9)
    assert not model.optimizer.decay_vectors


@pytest.mark.filterwarnings("ignore:.*BF16")
@pytest.mark.parametrize("precision", ["f32", "bf16-mixed"])
@pytest.mark.parametrize("more", [[], ["model.max_seq_len=96"]])
def test_the_precision_is_that_of_the_run(precision, more):
    settings = wanted(f"train.precision={precision}", *more)
    base = initial.open_base(settings).model
    base.set_mixed_precision(precision == "f32")  # whatever it was
    model = initial.build(initial.inherit(settings, base), base)
    assert model.module.mixed_precision == (precision == "bf16-mixed")


def test_adapters_of_the_run_stand_beside_the_weights_of_the_base():
    _, model = begun("model.lora={ rank = 2, alpha = 6.0, seed = 4 }")
    assert (model.config.lora.rank, model.config.lora.alpha, model.config.lora.seed) == (2, 6, 4)
    own = [each for each in model.weights() if "lora_" not in each[0]]
    assert_same_bits(own, TransformerLm.load_bin(TRAINED).weights())


def test_the_digest_is_of_the_weights_and_not_of_their_file(tmp_path):
    model = TransformerLm.load_bin(TRAINED)
    digest = initial.weights_sha256(model)
    model.save_pretrained(tmp_path / "same")
    assert initial.weights_sha256(TransformerLm.from_pretrained(tmp_path / "same")) == digest
    [(_, first), *_] = model.weights()
    first[0, 0] += 1e-3
    assert initial.weights_sha256(model) != digest
    assert initial.inherit(wanted(), model).train.init_sha256 == initial.weights_sha256(model)


@pytest.mark.parametrize("key", ["d_ff", "n_layers", "vocab_size", "n_kv_heads", "head_dim"])
def test_another_shape_is_refused_with_both_values(key):
    base = TransformerLm.load_bin(TRAINED)
    value = 2 * getattr(base.config, key)
    with pytest.raises(InvalidConfig, match=f"model.{key} is {value}, and the model in train.init"):
        initial.inherit(wanted(f"model.{key}={value}"), base)
