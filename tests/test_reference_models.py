"""Initial models compute what the reference system computed: logits, losses, gradients, counts."""

import pytest
import torch
from fixture_models import (
    CHUNK_LOSS,
    GRADIENTS,
    LOGITS,
    LOSS,
    MODELS,
    NORM,
    Reference,
    assert_loss,
    assert_norm,
    assert_values,
)

BATCHES = ("plain", "padded", "masked", "supervised")


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    return Reference(request.param)


@pytest.fixture(scope="module")
def model(reference):
    return reference.build()


def test_tensors_come_in_file_order(reference, model):
    shapes = [list(view.shape) for _, view in model.weights()]
    assert shapes == reference.expected["param_shapes"]


def test_parameters_are_counted(reference, model):
    expected = reference.expected["parameter_counts"]
    counts = model.parameter_counts()
    assert (counts.total, counts.active) == (expected["total"], expected["active"])
    assert str(counts) == expected["printed"]
    assert sum(view.numel() for _, view in model.weights()) == expected["total"]


def test_logits_of_whole_windows_agree(reference, model):
    with torch.no_grad():
        logits = model.module(reference.batch("plain").ids)
    assert_values(logits, reference.floats("logits_plain.f32"), LOGITS)


def test_logits_of_a_padded_batch_agree(reference, model):
    batch = reference.batch("padded")
    with torch.no_grad():
        logits = model.module(batch.ids, valid=batch.layout().valid)
    assert_values(logits, reference.floats("logits_padded.f32"), LOGITS)


def test_logits_of_the_trained_model_agree(reference):
    with torch.no_grad():
        logits = reference.trained(moments=False).module(reference.batch("plain").ids)
    assert_values(logits, reference.floats("logits_trained_plain.f32"), LOGITS)


def test_gradients_agree(reference, model):
    model.zero_grad()
    model.accumulate_step(reference.batch("plain"))
    views = [view.flatten() for _, view in model.gradients()]
    expected = reference.floats("grads_plain.f32").split([len(view) for view in views])
    # tensor by tensor is stricter than the file as a whole: some tensors' gradients are tiny
    for view, values in zip(views, expected, strict=True):
        assert_values(view, values, GRADIENTS)


@pytest.mark.parametrize("kind", BATCHES)
def test_losses_agree(reference, model, kind):
    expected = reference.expected[kind]["evaluate"]
    assert_loss(model.evaluate(reference.batch(kind)), expected, LOSS)


@pytest.mark.parametrize("kind", BATCHES)
def test_the_gradient_norm_agrees(reference, model, kind):
    model.zero_grad()
    loss = model.accumulate_step(reference.batch(kind))
    assert_loss(loss, reference.expected[kind]["evaluate"], LOSS)
    assert_norm(model.grad_norm(), reference.expected[kind]["grad_norm"], NORM)


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_hold_the_same_tokens_and_targets(reference, kind):
    expected = reference.expected[kind]
    batch = reference.batch(kind)
    found = {
        "ids": batch.ids.flatten().tolist(),
        "lengths": batch.lengths.tolist(),
        "batch": batch.batch(),
        "seq_len": batch.seq_len(),
        "predicted": batch.predicted(),
        "predicts": [batch.predicts(row) for row in range(batch.rows())],
    }
    named = expected.keys() & found.keys()
    assert named
    assert {name: found[name] for name in named} == {name: expected[name] for name in named}


def test_every_chunk_agrees(reference, model):
    chunks = reference.expected["chunks"]
    sequences, seq_len = chunks["sequences"], chunks["seq_len"]
    for index, (count, *losses) in enumerate(chunks["rows"]):
        chunk = reference.corpus.chunk(index, sequences, seq_len)
        assert chunk.batch() == count
        assert_loss(model.evaluate(chunk), losses, CHUNK_LOSS)
    assert reference.corpus.chunk(len(chunks["rows"]), sequences, seq_len) is None
