"""Steps that are replayed are the steps that an eager model takes."""

import pytest
import torch

from bench import graphed
from bench.contenders import Ours, random_ids
from bench.graphed import Graphed
from bench.shapes import TOY
from fastbrain import TransformerLm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def _python_for_graphs(monkeypatch):
    """Where there is no card, what would be captured is called again instead."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(graphed, "aside", lambda run: run())
        monkeypatch.setattr(graphed, "captured", called_again)


def called_again(run):
    """Like a graph, it writes its results where it wrote them before."""
    trainee, kept = run.__self__, {}

    def replay():
        run()
        for name in {"_loss", "_norm"} & vars(trainee).keys():
            fresh = getattr(trainee, name)
            setattr(trainee, name, kept.setdefault(name, fresh).copy_(fresh))

    return replay


@pytest.mark.usefixtures("_python_for_graphs")
@pytest.mark.filterwarnings("ignore:this CPU has no BF16:UserWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", TOY.values(), ids=TOY.keys())
def test_replayed_steps_are_eager_steps(shape, precision):
    eager, replayed = Ours(shape, DEVICE), Graphed(shape, DEVICE)
    for trainee in (eager, replayed):
        trainee.use(precision, None)
    batches = random_ids(shape)
    first = next(batches)
    # three times to warm up, and once to lay out the tables of the update
    for _ in range(4):
        step(eager, first)
    for ids in (first, next(batches), next(batches)):
        for ours, theirs in zip(step(replayed, ids), step(eager, ids), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("_python_for_graphs")
def test_what_a_step_returned_outlives_the_next():
    trainee = Graphed(TOY["dense"], DEVICE)
    batches = random_ids(TOY["dense"])
    loss, norm = step(trainee, next(batches))
    kept = float(loss), float(norm)
    step(trainee, next(batches))
    assert (float(loss), float(norm)) == kept


@pytest.mark.usefixtures("_python_for_graphs")
def test_the_update_is_captured_at_the_addresses_that_an_eager_one_has_seen(monkeypatch):
    trainee = Graphed(TOY["moe"], DEVICE)
    eager, at_capture = [], []
    update, capture = TransformerLm.step_clipped, graphed.captured

    def addresses():
        grads = [p.grad for p in trainee._model.module.parameters()]
        return [None if grad is None else grad.data_ptr() for grad in grads]

    def watched_update(lm, *given):
        eager.append(addresses())
        return update(lm, *given)

    def watched_capture(run):
        at_capture.append((addresses(), eager[-1]))
        return capture(run)

    monkeypatch.setattr(TransformerLm, "step_clipped", watched_update)
    monkeypatch.setattr(graphed, "captured", watched_capture)
    trainee.accumulate(next(random_ids(TOY["moe"])))
    (before_backward, _), (before_update, seen) = at_capture
    # a captured backward makes its gradients, and does not add to older ones
    assert set(before_backward) == {None}
    assert None not in before_update
    assert before_update == seen


@pytest.mark.usefixtures("_python_for_graphs")
@pytest.mark.filterwarnings("ignore:this CPU has no BF16:UserWarning")
def test_another_precision_is_captured_anew(monkeypatch):
    captures = []
    capture = graphed.captured
    monkeypatch.setattr(graphed, "captured", lambda run: captures.append(run) or capture(run))
    trainee = Graphed(TOY["dense"], DEVICE)
    ids = next(random_ids(TOY["dense"]))
    for precision, graphs in (("fp32", 2), ("fp32", 2), ("bf16", 4)):
        trainee.use(precision, None)
        step(trainee, ids)
        assert len(captures) == graphs


def test_a_machine_without_a_card_is_told():
    assert Graphed.missing(torch.device("cpu")) == "CUDA graphs need a CUDA device"
    assert Graphed.missing(torch.device("cuda")) is None


def step(trainee, ids):
    trainee.zero_grad()
    loss = trainee.accumulate(ids)
    return loss, trainee.update()
