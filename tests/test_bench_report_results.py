"""What a result file of each kind looks like on the page, and which files are refused."""

import json

import pytest
from result_files import (
    KINDS,
    MACHINE,
    cells,
    device_check,
    lines_with,
    operations,
    put,
    sweep,
    training_step,
)

from bench.report import measured
from bench.report.results import BadResult


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_a_training_step_renders(folder):
    text = measured.section(put(folder, training_step()))
    assert "### NVIDIA GeForce RTX 3060" in text
    assert "#### Training step (MEASURED)" in text
    [line] = lines_with(text, "| fastbrain bf16 | 21,002")
    assert cells(line)[2:] == ["27.6", "21,001 21,003 21,002", "1.98", "4,321"]
    assert lines_with(text, "| fastbrain bf16 | llama bf16 | 2.334 | 1.250 | 2.555 |")
    assert lines_with(text, "| rest | 75.0 (75%) | 50.0 (50%) |")
    assert lines_with(text, "| head | 0.0 (0%) |  |")
    # the largest of ours first
    assert text.index("| rest | ") < text.index("| attention | ") < text.index("| head | ")
    assert "cuda" not in text
    assert lines_with(text, "torch.compile did not run: there is no compiler")
    for fact in ("driver        600.1", "torch         2.13.0", "triton        3.7.1"):
        assert fact in text
    assert text.index("python -m bench.something --json FILE") < text.index("21,002")


def test_a_sweep_renders(folder):
    text = measured.section(put(folder, sweep()))
    assert "MEASURED" in lines_with(text, "#### Sweep")[0]
    [line] = lines_with(text, "| 16 x 512 | BF16")
    assert cells(line)[3:] == [
        "61,234", "61,000 to 61,400", "9.5", "0.1734", "68.0", "2,222", "3,333", "70,000", "1,971",
    ]  # fmt: skip
    assert lines_with(text, "32000 9999", "failed: no multiple of 64")
    assert lines_with(text, "something else uses the GPU")
    assert "driver        600.1" in text


def test_operations_render(folder):
    text = measured.section(put(folder, operations()))
    [line] = lines_with(text, "| attention forward |")
    assert cells(line)[1:] == [
        "fused", "0.500", "10.0 TFLOPS", "sdpa", "0.600", "1.20", "reference 4.000, flex 0.700",
        "3", "7", "",
    ]  # fmt: skip
    [line] = lines_with(text, "| training step dense bf16 |")
    assert cells(line)[3] == "20,480 tokens/s"
    assert cells(line)[-1] == "28.3"
    [line] = lines_with(text, "| read a batch |")
    assert cells(line)[3] == "160.0 MB/s"
    document = operations()
    document["rows"][2]["bytes"] = 32e4
    [line] = lines_with(measured.section(put(folder, document)), "| read a batch |")
    assert cells(line)[3] == "1.6 GB/s"
    assert not lines_with(text, "| gone |")
    assert lines_with(text, "* liger did not run: liger-kernel is not installed")
    assert lines_with(text, "* attention forward: xformers FAILED: it crashed")


def test_toy_sizes_are_not_quoted(folder):
    text = measured.section(put(folder, operations(toy=True)))
    assert lines_with(text, "| read a batch |")
    assert "attention" not in text
    assert "training step dense" not in text
    assert "3 of 4 cases ran at a CPU's toy size" in text
    text = measured.section(put(folder, operations(toy=True, rows=operations()["rows"][:1])))
    assert not lines_with(text, "| case |")


def test_a_device_check_renders(folder):
    text = measured.section(put(folder, device_check()))
    assert lines_with(text, "| twins | failed | 1.5 | 135 | 1 | 1 | 0 | adam |")
    assert lines_with(text, "| operations | passed | 2.0 | 90 | 2 | 0 | 1 |  |")
    assert lines_with(text, "* twins, swiglu failed: ValueError: wrong | sum")
    assert lines_with(text, "* graphs: the process ended with SIGSEGV")
    assert "in thread 7" not in text
    [line] = lines_with(text, "| dense, fastbrain |")
    assert cells(line)[2:] == [
        "8 x 1024", "22,222", "26.0", "1.013", "3,210", "25,000", "3,300",
    ]  # fmt: skip
    [line] = lines_with(text, "| dense, plain PyTorch |")
    assert cells(line)[3:] == ["55,555", "10.4", "1.013", "3,210", "", ""]
    [line] = lines_with(text, "| attention |")
    assert cells(line)[1:8] == [
        "fused", "0.500", "10.0 TFLOPS", "sdpa", "0.600", "1.20", "reference 4.000",
    ]  # fmt: skip
    assert not [line for line in lines_with(text, "|") if line.startswith("| adam |")]


def test_files_of_one_machine_stand_together(folder):
    cpu = MACHINE | {"card": "none", "cpu": "Some CPU, 2 threads"}
    put(folder, training_step(), "a.json")
    put(folder, training_step(machine=cpu), "b.json")
    text = measured.section(put(folder, device_check(), "c.json"))
    titles = lines_with(text, "### ")
    assert [title.split("(")[0].strip() for title in titles] == [
        "### NVIDIA GeForce RTX 3060",
        "#### Training step",
        "#### Device check",
        "### Some CPU",
        "#### Training step",
    ]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"kind": "horoscope"}, "'horoscope', which is none of"),
        ([1, 2], "kind None"),
        ("{", "not valid JSON"),
        ('{"kind": "sweep", "rows": [NaN]}', "NaN"),
        (training_step(machine={}), "does not say its command, commit, date, torch, card or"),
        (training_step(machine=MACHINE | {"commit": ""}), "does not say its commit under"),
        (training_step(machine=MACHINE | {"command": "x --smoke"}), "--smoke runs toy sizes"),
        (device_check(machine=MACHINE | {"command": "x.sh --dry"}), "--dry runs toy sizes"),
        (sweep(rows=[{"result": 3}]), "not laid out like one"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(folder, document, words):
    with pytest.raises(BadResult, match=r"^found\.json ") as caught:
        put(folder, document)
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_lacks_a_field_is_refused_by_name(folder, kind):
    document = KINDS[kind]()
    largest = max(document, key=lambda name: len(str(document[name])))
    document[largest] = [{}] if isinstance(document[largest], list) else {"steps": {"cases": {}}}
    with pytest.raises(BadResult, match=r"^found\.json .*not laid out like one"):
        measured.section(put(folder, document))


def test_sweeps_of_two_machines_are_no_table(folder):
    document = sweep()
    row = json.loads(json.dumps(document["rows"][0]))
    row["result"]["device"]["name"] = "another"
    with pytest.raises(BadResult, match="more than one device"):
        put(folder, sweep(rows=[*document["rows"], row]))
