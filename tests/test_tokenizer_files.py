"""The files beside a tokenizer: read where they are sound, named where not, waited for never."""

import json
import os

import pytest
from hostile_readers import measured
from texts import small_tokenizer

from fastbrain.errors import Io, Serde
from fastbrain.tokens.tokenizer_files import TokenizerFiles

NAMES = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@pytest.fixture
def folder(tmp_path):
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def refused(folder, kind, message):
    def read():
        with pytest.raises(kind, match=message):
            TokenizerFiles.read(folder)

    measured(read)


def test_without_files_beside_it_a_tokenizer_has_its_usual_tokens(folder):
    found = TokenizerFiles.read(folder)
    assert (found.eos, found.pad, found.ends) == ("<|endoftext|>", "<|pad|>", (0,))
    assert found.chat_template is None


def test_a_template_in_a_file_of_its_own_comes_before_the_one_in_the_settings(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert TokenizerFiles.read(folder).chat_template == "old"
    (folder / "chat_template.jinja").write_text("new \u00e9", "utf-8")
    assert TokenizerFiles.read(folder).chat_template == "new \u00e9"


@pytest.mark.parametrize("name", [*NAMES, "tokenizer.json"])
def test_what_may_never_end_is_refused_by_name(folder, name):
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    refused(folder, Io, f"cannot read .*{name}: it is not a plain file")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(folder, Io, f"cannot read .*{name}: it is not a plain file")


@pytest.mark.parametrize("name", [*NAMES, "tokenizer.json"])
def test_a_file_larger_than_any_is_refused_unread(folder, name):
    (folder / name).touch()
    # of this size, and it takes no place on the disk
    os.truncate(folder / name, 2 << 30)
    refused(folder, Serde, f"{name} has 2147483648 bytes, more than the [0-9]+ allowed")


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize("content", [b"{", b"", b"\xff{}", b"[" * 100_000])
def test_settings_that_are_broken_are_refused_by_name(folder, name, content):
    (folder / name).write_bytes(content)
    refused(folder, Serde, f"{name} is not valid JSON: ")


@pytest.mark.parametrize("name", NAMES[:2])
def test_settings_that_are_no_object_are_refused_by_name(folder, name):
    (folder / name).write_text('["<|endoftext|>"]')
    refused(folder, Serde, f"{name} must hold an object")


def test_a_template_that_is_no_text_is_refused_by_name(folder):
    (folder / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    refused(folder, Serde, r"chat_template\.jinja is not UTF-8")
