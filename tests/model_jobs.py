"""What ranks do in tests of a distributed model: the same as one process beside them, compared.

Every rank also has a whole model to itself, the truth that the shared one is held to.
"""

import copy
import gc
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch
from agreement_jobs import meeting
from models import SHAPES, batch, model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fastbrain import InvalidConfig, LoraConfig, Optimizer, TokenBatch, TransformerLm, layers
from fastbrain.layers import Weight
from fastbrain.parallel.ranks import Ranks
from fastbrain.parallel.shards import bytes_held, whole

OPTIMIZERS = {
    "adam": Optimizer.adam(1e-2, weight_decay=0.5, decay_vectors=False),
    "adam-all": Optimizer.adam(1e-2, weight_decay=0.5),
    "lion": Optimizer.lion(1e-3, weight_decay=0.5),
    "sgd": Optimizer.sgd(0.1),
}


def pair(
    ranks: Ranks,
    parallel: str,
    shape: str,
    kind: str = "adam",
    bf16: bool = False,
    lora: bool = False,
) -> tuple[TransformerLm, TransformerLm]:
    """A model of these ranks, and one of this rank alone; each already has moments."""
    found = []
    for shared in (True, False):
        lm = model(SHAPES[shape], copy.copy(OPTIMIZERS[kind]))
        lm.set_mixed_precision(bf16)
        if lora:
            lm.add_lora(LoraConfig(2, alpha=8.0))
        for seed in (1, 2):
            lm.accumulate_step(batch(4, 12, seed=seed))
            lm.step(1.0)
        if shared:
            lm.distribute(ranks, parallel)
        found.append(lm)
    return found[0], found[1]


def same_gradient(lm: TransformerLm, seed: int, times: float = 1.0) -> None:
    """The gradient of one batch, to the bit: it is the first rank's, and all others add zero."""
    first = lm._ranks is None or lm._ranks.leads
    lm.accumulate_step(batch(4, 12, seed=seed), weight=times if first else 0.0)


def contents(lm: TransformerLm) -> dict[str, Tensor]:
    """All of its weights and moments."""
    return {
        f"{kind}.{name}": whole(tensor).clone()
        for kind, tensors in lm.tensors().items()
        for name, tensor in tensors.items()
    }


def gradients(lm: TransformerLm) -> Tensor:
    """All of its gradients, in one vector of FP64."""
    own = [p.grad for p in lm.module.parameters() if p.requires_grad]
    return torch.cat([whole(each).flatten().double() for each in own if each is not None])


def differing(found: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert found.keys() == right.keys()
    return [name for name, tensor in found.items() if not torch.equal(tensor, right[name])]


def deviation(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor."""
    return max(relative(tensor, right[name]) for name, tensor in found.items())


def relative(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))


def updates(parallel: str, shape: str, kinds: list[str], bf16: bool, lora: bool) -> dict:
    """Steps with a gradient that is the same to the bit, by some rules, with and without clipping.

    Returns for each rule how far weights and moments are from right after two plain updates and
    after a clipped one, how far the norm is, and what one that is skipped changed.
    """
    found = {}
    with meeting() as ranks:
        for kind in kinds:
            ours, alone = pair(ranks, parallel, shape, kind, bf16, lora)
            begun = contents(ours)
            for seed in (3, 4):
                for lm in (ours, alone):
                    same_gradient(lm, seed)
                    lm.step(1.0)
            plain = contents(ours)
            report = {
                "begun": differing(begun, plain),
                "plain": deviation(plain, contents(alone)),
                "differing": differing(plain, contents(alone)),
            }
            norms, clipped = [], []
            for lm in (ours, alone):
                same_gradient(lm, 5)
                norms.append([lm.grad_norm(), lm.step_clipped(0.5, 0.01)])
                clipped.append(contents(lm))
            report["norms"] = [relative(a, b) for a, b in zip(*norms, strict=True)]
            report["halved"] = relative(norms[0][1], norms[0][0] / 2)
            report["clipped_to"] = float(norms[0][1])
            report["clipped"] = deviation(*clipped)
            same_gradient(ours, 6)
            ours.step_clipped(1.0, 1.0, torch.tensor(float("nan")))
            report["skipped"] = differing(contents(ours), clipped[0])
            report["left"] = float(ours.grad_norm())
            report["steps"] = [ours.optimizer_step(), alone.optimizer_step()]
            found[kind] = report
    return found


class Collectives(TorchDispatchMode):
    """Counts what is sent between ranks while it is on, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.name().removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


def collectives(parallel: str, shape: str) -> list[dict]:
    """What steps of one and of four micro-batches send, by name, and the update after each."""
    found = []
    with meeting() as ranks:
        ours, _ = pair(ranks, parallel, shape)
        for micros in (1, 4):
            with Collectives() as sent:
                for micro in range(micros):
                    with ours.no_sync() if micro < micros - 1 else nullcontext():
                        ours.accumulate_step(batch(2, 8, seed=micro))
            with Collectives() as sent_after:
                ours.step_clipped(1.0, 1.0)
            found.append([sent.counts, sent_after.counts])
    return found


def ragged(parallel: str, shape: str, rows: int, micros: list[int]) -> list[float]:
    """How far the gradient of ragged rows, a few at a time on each rank, is from the whole's."""
    silent = {"aux_loss_weight": 0.0, "router_z_loss_weight": 0.0, "max_seq_len": 64}
    config = replace(SHAPES[shape], **silent)
    sequences = [batch(1, 2 + 37 * i % 63, seed=100 + i).ids[0] for i in range(rows)]
    found = []
    with meeting() as ranks:
        ours, alone = model(config), model(config)
        alone.accumulate_step(TokenBatch(sequences))
        ours.distribute(ranks, parallel)
        predicted = sum(len(each) - 1 for each in sequences)
        share = rows // ranks.size
        own = sequences[ranks.rank * share : (ranks.rank + 1) * share]
        for micro in micros:
            ours.zero_grad()
            for first in range(0, share, micro):
                each = TokenBatch(own[first : first + micro])
                with nullcontext() if first + micro >= share else ours.no_sync():
                    ours.accumulate_step(each, weight=each.predicted() / predicted)
            found.append(relative(gradients(ours), gradients(alone)))
    return found


def live_bytes() -> int:
    """Bytes of all the memory that tensors made since `gc.freeze` have, each counted once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor) and type(each) in (Tensor, torch.nn.Parameter):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def memory(bf16: bool, parallel: str) -> dict:
    """Bytes that a rank has of a model whose weights are most of what there is, at rest.

    Those of parameters, gradients and moments after a backward, after an update and after an
    evaluation, counted by tensor and counted by what is alive; and of shadows that wait in a graph.
    """
    config = replace(SHAPES["dense"], vocab_size=512, d_model=96, d_ff=256)
    held, alive, waiting, shadows = {}, {}, [], []
    cast, backward = layers._passing_shadow, Tensor.backward

    def casting(weight, dtype):
        shadow = cast(weight, dtype)
        shadows.append(weakref.ref(shadow))
        return shadow

    def beginning(loss, *arguments):
        gc.collect()
        waiting.append(sum(each() is not None for each in shadows))
        backward(loss, *arguments)

    with meeting() as ranks:
        gc.freeze()  # what was there before is of no interest, and slow to look through

        def count(when: str) -> None:
            parameters = list(ours.module.parameters())
            gradients = [p.grad for p in parameters if p.grad is not None]
            kinds = [parameters, gradients, *map(dict.values, ours._state.moments())]
            held[when] = [bytes_held(each) for each in kinds]
            alive[when] = live_bytes()

        ours = TransformerLm(config, Optimizer.adam(1e-2), seed=1)
        ours.set_mixed_precision(bf16)
        ours.distribute(ranks, parallel)
        scored = batch(2, 8)
        with (
            patch.object(layers, "_passing_shadow", casting),
            patch.object(Tensor, "backward", beginning),
        ):
            for _ in range(2):
                ours.accumulate_step(batch(2, 8))
                count("backward")
                ours.step(1.0)
                count("update")
            ours.evaluate(scored)
            count("evaluation")
            del scored
        return {
            "parameters": sum(p.numel() for p in ours.module.parameters()),
            "held": held,
            "alive": alive,
            "cast": len(shadows),
            "waiting": waiting,
            "left": sum(each() is not None for each in shadows),
            "kept": products_kept(ours),
        }


def evaluations(parallel: str, cases: list[list]) -> list[dict]:
    """Losses of one batch before each of some updates, and those of the model gathered.

    Cases are a shape, whether operands are BF16 and whether there are adapters.
    """
    found = []
    with meeting() as ranks:
        for shape, bf16, lora in cases:
            ours, _ = pair(ranks, parallel, shape, "adam", bf16, lora)
            found.append(_evaluated(ours))
    return found


def _evaluated(ours: TransformerLm) -> dict:
    scored, losses, of_gathered, kept = batch(3, 10, seed=9), [], [], 0
    for seed in range(4):
        losses.append(float(ours.evaluate(scored).lm_loss))
        kept += products_kept(ours)
        whole_model = ours.gathered(moments=False)
        if whole_model is not None:
            of_gathered.append(float(whole_model.evaluate(scored).lm_loss))
        ours.accumulate_step(batch(4, 12, seed=20 + seed))
        ours.step(1.0)
    return {"losses": losses, "of_gathered": of_gathered, "kept": kept}


def products_kept(lm: TransformerLm) -> int:
    """Of how many weights a shadow is there, or the product with an adapter."""
    weights = [each for each in lm.module.modules() if isinstance(each, Weight)]
    return sum(each.shadow is not None or each._folded is not None for each in weights)


def gathers(parallel: str, shape: str, lora: bool) -> dict:
    """A model distributed and gathered again, and what a distributed one refuses."""
    with meeting() as ranks:
        ours, alone = pair(ranks, parallel, shape, lora=lora)
        right, found = contents(alone), ours.gathered()
        report = {"parallel": ours.parallel, "sharded": ours.sharded, "found": found is not None}
        if isinstance(ours._net, DistributedDataParallel):
            same_gradient(ours, 3)
            # what DDP would do at the begin of the next forward
            report["cut anew"] = ours._net.reducer._rebuild_buckets()
        if found is not None:
            report["differing"] = differing(contents(found), right)
            report["step"] = [found.optimizer_step(), alone.optimizer_step()]
            report["precision"] = found._mixed_precision
            report["warm"] = found._state.cold_since is None
        # on every rank what it has is its part of the whole
        report["held"] = differing(contents(ours), right)
        bare = ours.gathered(moments=False)
        if bare is not None:
            report["moments"] = bare._state.has_moments() and bare is not ours
        refused = {}
        for name, call in {
            "distribute": lambda: ours.distribute(ranks, parallel),
            "word": lambda: alone.distribute(ranks, "both"),
            "to_cuda": ours.to_cuda,
            "to_cpu": ours.to_cpu,
            "add_lora": lambda: ours.add_lora(LoraConfig(2)),
            "merge_lora": ours.merge_lora,
            "weights": ours.weights,
            "gradients": ours.gradients,
            "moments": ours.moments,
            "decoder": ours.decoder,
            "generate": lambda: ours.generate([1], 1, None),
            "generate_batch": lambda: ours.generate_batch([[1]], 1, None),
        }.items():
            try:
                call()
            except InvalidConfig as error:
                refused[name] = str(error)
            except Exception:
                pass
        report["refused"] = refused
    return report
