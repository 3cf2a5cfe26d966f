"""Instructions and tokens are made once for a run: with which tokenizer, and what is held out."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_texts import TEMPLATES, byte_level
from instruction_runs import files, pairs

from fastbrain import TransformerLm
from fastbrain.errors import InvalidDataset
from fastbrain.tokens import TokenFile
from fastbrain.tokens.chat_template import ChatTemplate
from fastbrain.tokens.tokenizer_files import TokenizerFiles
from fastbrain.training import data, incidents
from fastbrain.training.corpus import Corpus, InstructionCorpus
from fastbrain.training.devices import Device
from fastbrain.training.guard import Guard, Kind, Verdict
from fastbrain.training.recorder import Settled
from fastbrain.training.settings import Settings
from fastbrain.training.snapshot import Camera
from fastbrain.training.state import State

WORDS = files()
SEQ_LEN = 8


def rows(path: Path, count: int, first: int = 10) -> Path:
    """Examples that fill a row each: three ids to read, of which the first tells them apart."""
    lines = []
    for index in range(count):
        ids = [first + index, 1, 2, 3, 3, 3, 3, WORDS.eos_id]
        lines.append({"input_ids": ids, "labels": [-100] * 3 + ids[3:]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings(train: Path, seq_len: int = SEQ_LEN, kind: str = "instructions", **more) -> Settings:
    tables = {
        "model": {"vocab_size": 304, "d_model": 16, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1,
                  "head_dim": 16, "d_ff": 16, "moe_layers": [], "max_seq_len": 64},
        "data": {"train": str(train), "kind": kind, "seq_len": seq_len, **more},
        "train": {"init": "base", "max_steps": 9, "global_batch_size": 2, "micro_batch_size": 1},
    }  # fmt: skip
    return Settings.from_tables(tables)


def made(wanted: Settings, folder: Path, init: TokenizerFiles | None = WORDS) -> Corpus:
    data.make(wanted, folder, lambda _: None, init)
    return data.open_corpus(wanted, folder)


def marks(ids: list[list[int]]) -> list[int]:
    return [each[0] for each in ids]


# what is held out


def held_out(corpus: InstructionCorpus) -> list[int]:
    return [mark for b in corpus.held_out_batches(2) for mark in marks(b.ids.tolist())]


@pytest.mark.parametrize(("budget", "count"), [(3 * SEQ_LEN + 7, 3), (SEQ_LEN - 1, 1), (999, 5)])
def test_the_last_rows_are_held_out_up_to_a_number_of_tokens(tmp_path, monkeypatch, budget, count):
    monkeypatch.setattr(data, "EVALUATION_TOKENS", budget)
    corpus = made(settings(rows(tmp_path / "a.jsonl", 81)), tmp_path / "data")
    assert held_out(corpus) == [*range(10 + 76, 10 + 76 + count)]
    # those that are not scored are not trained on either
    assert corpus.epoch_rows == 76
    assert sorted(corpus.origins(0, 76)) == [*range(76)]


@pytest.mark.parametrize(("budget", "count"), [(3 * SEQ_LEN + 7, 3), (SEQ_LEN - 1, 1), (999, 9)])
def test_validation_rows_are_scored_up_to_a_number_of_tokens(tmp_path, monkeypatch, budget, count):
    monkeypatch.setattr(data, "EVALUATION_TOKENS", budget)
    other = rows(tmp_path / "b.jsonl", 9, first=100)
    wanted = settings(rows(tmp_path / "a.jsonl", 6), validation=str(other))
    corpus = made(wanted, tmp_path / "data")
    assert held_out(corpus) == [*range(100, 100 + count)]
    assert corpus.epoch_rows == 6


def test_one_row_cannot_be_trained_on_and_held_out(tmp_path):
    one = rows(tmp_path / "a.jsonl", 1)
    with pytest.raises(InvalidDataset) as caught:
        made(settings(one), tmp_path / "data")
    assert str(caught.value) == (
        f"{tmp_path / 'data' / 'train.packed'} has one row of data.seq_len 8 packed tokens, and "
        "training needs one beside what is held out: give more examples, data.validation, or a "
        "lower data.seq_len"
    )
    corpus = made(settings(one, validation=str(one)), tmp_path / "both")
    assert (corpus.epoch_rows, held_out(corpus)) == (1, [10])


def test_prompts_come_from_all_over_what_is_held_out(tmp_path):
    other = rows(tmp_path / "b.jsonl", 20, first=100)
    wanted = settings(rows(tmp_path / "a.jsonl", 2), validation=str(other))
    corpus = made(wanted, tmp_path / "data")
    assert corpus.prompts(4, 99) == [[100 + row, 1, 2] for row in (0, 5, 10, 15)]
    # the end of a long one is kept: the response follows it
    assert corpus.prompts(4, 2) == [[1, 2]] * 4
    assert marks(corpus.prompts(99, 99)) == [100 + row * 20 // 99 for row in range(20)]


# with which tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer that begins a text and names its template, in files of Hugging Face's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = byte_level()
    words.tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": words.eos, "pad_token": words.pad, "bos_token": words.bos,
             "chat_template": TEMPLATES["llama"]}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def test_a_named_tokenizer_goes_before_that_of_the_model(tmp_path, folder):
    wanted = settings(rows(tmp_path / "a.jsonl", 3), tokenizer=str(folder))
    wanted = replace(wanted, model={**wanted.model, "vocab_size": 900})
    corpus = made(wanted, tmp_path / "data")
    kept = corpus.vocabulary.files
    assert kept.tokenizer.to_str() == TokenizerFiles.read(folder).tokenizer.to_str()
    assert kept.tokenizer.to_str() != WORDS.tokenizer.to_str()
    assert kept.bos == byte_level().bos is not None
    assert kept.chat_template == TEMPLATES["llama"]
    assert kept.ends == (kept.eos_id, kept.tokenizer.token_to_id("<|eot_id|>"))


def test_a_token_file_keeps_the_tokenizer_of_the_model(tmp_path):
    TokenFile.write(tmp_path / "a.bin", np.arange(200) % 300)
    wanted = settings(tmp_path / "a.bin", kind="text")
    corpus = made(wanted, tmp_path / "data")
    assert corpus.vocabulary.files.tokenizer.to_str() == WORDS.tokenizer.to_str()
    assert (tmp_path / "data" / "tokenizer.json").is_file()
    assert made(wanted, tmp_path / "plain", None).vocabulary is None


def saved(wanted: Settings, corpus: Corpus, folder: Path) -> Mapping[str, bytes]:
    """The JSON files of a checkpoint, written to a folder."""
    model = TransformerLm(wanted.config(corpus.vocabulary.size), seed=1)
    documents = Camera(model, corpus, Device.find(), "an-id").take(wanted, State()).documents
    for name, content in documents.items():
        (folder / name).write_bytes(content)
    return documents


def test_a_checkpoint_carries_the_template_and_every_id_that_ends_a_response(tmp_path):
    text = TEMPLATES["chatml"] + "{# ours #}"
    (tmp_path / "ours.jinja").write_text(text)
    wanted = settings(
        pairs(tmp_path / "a.jsonl"), seq_len=48, template=str(tmp_path / "ours.jinja")
    )
    corpus = made(wanted, tmp_path / "data")
    documents = saved(wanted, corpus, tmp_path)
    said = {name: json.loads(content) for name, content in documents.items()}
    ends = [WORDS.eos_id, WORDS.tokenizer.token_to_id("<|im_end|>")]
    assert said["tokenizer_config.json"]["chat_template"] == text
    assert said["generation_config.json"]["eos_token_id"] == ends
    assert said["config.json"]["eos_token_id"] == ends
    # whoever opens the checkpoint answers as it was trained to
    opened = TokenizerFiles.read(tmp_path)
    assert (opened.chat_template, opened.ends) == (text, tuple(ends))


def test_a_checkpoint_is_asked_as_it_was_trained(tmp_path, folder):
    wanted = settings(pairs(tmp_path / "a.jsonl", 3), seq_len=64, tokenizer=str(folder))
    wanted = replace(wanted, model={**wanted.model, "vocab_size": 900})
    corpus = made(wanted, tmp_path / "data")
    saved(wanted, corpus, tmp_path)
    opened = TokenizerFiles.read(tmp_path)
    begin = opened.tokenizer.token_to_id("<|begin|>")
    assert opened.bos == corpus.vocabulary.files.bos == "<|begin|>"
    prompts = [
        ChatTemplate(each).encode([{"role": "user", "content": "Say plum twice."}], True).ids
        for each in (corpus.vocabulary.files, opened)
    ]
    assert prompts[0] == prompts[1]
    assert prompts[0][0] == begin
    # as every document begins that it was trained on
    assert corpus.read([0]).ids[0, 0] == begin


# data that is made anew, and steps that are passed over


def test_every_file_that_the_run_was_trained_on_is_remembered(tmp_path):
    first = settings(rows(tmp_path / "a.jsonl", 4))
    fingerprints = [made(first, tmp_path / "data").fingerprint]
    for count in (5, 6):
        now = settings(rows(tmp_path / f"{count}.jsonl", count))
        data.keep(data.remake(now, tmp_path / "data", lambda _: None), tmp_path / "data")
        corpus = data.open_corpus(now, tmp_path / "data")
        assert corpus.replaced == fingerprints
        assert corpus.epoch_rows == count - 1
        fingerprints.append(corpus.fingerprint)
    # made again, it is the same and nothing was replaced
    data.keep(data.remake(now, tmp_path / "data", lambda _: None), tmp_path / "data")
    assert data.open_corpus(now, tmp_path / "data").replaced == fingerprints[:2]


def test_a_bad_step_names_the_rows_that_it_read_after_a_rollback(tmp_path):
    wanted = settings(rows(tmp_path / "a.jsonl", 60))
    corpus = made(wanted, tmp_path / "data")
    settled = Settled(5, 1.0, 1.0, [1.0, 2.0], Verdict(Kind.SKIP, None, None))
    read = corpus.origins(4 + 3, 2)
    assert read != corpus.origins(4, 2)
    row = incidents.row(settled, Guard(data_skips=[(2, 3)]), corpus, wanted)
    assert (row["step"], row["data_step"], row["offsets"]) == (5, 7, read)
    assert [each["offset"] for each in row["rows"]] == read[1:]
    word = WORDS.tokenizer.decode([10 + read[1]], skip_special_tokens=False)
    assert row["rows"][0]["text"].startswith(word)
    before = incidents.row(settled, Guard(data_skips=[(5, 3)]), corpus, wanted)
    assert (before["data_step"], before["offsets"]) == (4, corpus.origins(4, 2))


def test_rows_of_a_step_are_cut_in_order(tmp_path):
    corpus = made(settings(rows(tmp_path / "a.jsonl", 30)), tmp_path / "data")
    whole = corpus.read(corpus.origins(3, 6)).ids
    parts = [batch.ids for batch in corpus.step_batches(3, 6, 2)]
    assert [len(part) for part in parts] == [2, 2, 2]
    assert torch.equal(torch.cat(parts), whole)
