"""A model that several ranks train together: each has a whole one, or a part of one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastbrain.config import LoraConfig
from fastbrain.devices import naming_remedies
from fastbrain.errors import InvalidConfig
from fastbrain.parallel.ranks import Ranks, hearing
from fastbrain.parallel.replicas import replicate
from fastbrain.parallel.shards import fill, is_sharded, shard, whole
from fastbrain.stored_model import StoredModel

# how `distribute` shares a model: replicas (DistributedDataParallel) or parts (FSDP2)
DDP, FSDP = "ddp", "fsdp"


class DistributedModel(StoredModel):
    """A `StoredModel` that may be one rank's; until `distribute` it is like any other."""

    _net: nn.Module
    _ranks: Ranks | None = None
    # of replicas: whether gradients are there that were summed over the ranks, or were not yet
    _summed = _apart = False

    def _build(self, *arguments: Any, **keywords: Any) -> None:
        super()._build(*arguments, **keywords)
        self._net, self._ranks = self.module, None

    def distribute(self, ranks: Ranks, parallel: str = DDP) -> None:
        """Trains this model together with other ranks from now on, on this one's device.

        Every rank calls it, with the same moments; weights become those of the first. From then on
        gradients are sums over the ranks: give `accumulate_step` weights that are shares of the
        whole step. Alone, it only moves the model to the device.

        Args:
            ranks: of `Ranks.join`.
            parallel: "ddp", a whole model on every rank, or "fsdp", a part of one.

        Raises:
            InvalidConfig: another word, no `Ranks`, or it was called before.
            Cuda: the device ran out of memory.
            RankLost: another rank is gone.
        """
        if parallel not in (DDP, FSDP):
            raise InvalidConfig(f'parallel must be "{DDP}" or "{FSDP}", got {parallel!r}')
        if not isinstance(ranks, Ranks):
            raise InvalidConfig(f"ranks must be what Ranks.join() returns, got {ranks!r}")
        self._refuse_distributed("distribute")
        with naming_remedies(), hearing(ranks):
            if ranks.size == 1 or parallel == DDP:
                self._to(ranks.device)
            if ranks.size == 1:
                return
            self.zero_grad()
            if parallel == DDP:
                self._net = replicate(self.module, ranks)
            else:
                shard(self.module, ranks)
            self._state.distribute(ranks)
            self._set_precision()
        self._ranks = ranks

    @property
    def parallel(self) -> str | None:
        """How the ranks share this model, "ddp" or "fsdp"; None where there is one."""
        if self._ranks is None:
            return None
        return FSDP if self.sharded else DDP

    @property
    def sharded(self) -> bool:
        """Whether this rank has but a part of every tensor."""
        return is_sharded(self.module)

    def no_sync(self) -> AbstractContextManager[None]:
        """For all micro-batches of a step but its last: gradients of replicas are not yet summed.

        A step whose last one is under it too, or one before it is not, is refused. Those of a model
        in parts are summed every time, because no rank has room for them whole.
        """
        if isinstance(self._net, DistributedDataParallel):
            return self._net.no_sync()
        return nullcontext()

    def gathered(self, moments: bool = True) -> Self | None:
        """This model whole, on the first rank, and None on the others; all ranks have to call it.

        A replica is whole as it is. What is in parts is gathered, tensor by tensor, into a new
        model on the CPU.

        Args:
            moments: whether the optimizer's moments come along.
        """
        leads = self._ranks is None or self._ranks.leads
        if not self.sharded:
            return self if leads else None
        found = None
        if leads:
            found = type(self).__new__(type(self))
            found._build(self.config, self.optimizer)
            found._mixed_precision = self._mixed_precision
            found._set_precision()
            found._state.set_step(self.optimizer_step())
        new = {} if found is None else found.tensors(moments)
        with hearing(self._ranks):
            for kind, tensors in self.tensors(moments).items():
                for name, tensor in tensors.items():
                    values = whole(tensor)
                    if leads:
                        fill(new[kind][name], values)
        if found is not None and moments:
            found._state.mark_warm()
        return found

    def tensors(self, moments: bool = True) -> dict[str, dict[str, Tensor]]:
        """Weights and moments under the module's parameter names, in parts where the model is.

        Args:
            moments: whether they are wanted; they appear when they are first asked for.

        Returns:
            "weight", "moment1" and "moment2"; a frozen parameter has no moments.
        """
        weights = {name: p.detach() for name, p in self.module.named_parameters()}
        if not moments:
            return {"weight": weights}
        first, second = self._state.moments()
        return {"weight": weights, "moment1": first, "moment2": second}

    def forget_moments(self) -> None:
        """Begins anew: zero moments, and a step counter of 0."""
        self._state.forget_moments()
        self._state.set_step(0)

    def zero_grad(self) -> None:
        """Clears the accumulated gradients."""
        self._state.clear_gradients()
        self._summed = self._apart = False

    def _before_backward(self) -> None:
        if not isinstance(self._net, DistributedDataParallel):
            return
        if self._summed:
            raise InvalidConfig(
                "accumulate_step: the gradients of this step have been summed over the ranks "
                "already; all micro-batches of a step but its last belong under no_sync()"
            )
        self._summed = self._net.require_backward_grad_sync
        self._apart = not self._summed

    def _before_update(self) -> None:
        if self._apart:
            raise InvalidConfig(
                "step: the gradients have not been summed over the ranks; the last micro-batch of "
                "a step belongs outside of no_sync()"
            )
        self._summed = False

    def add_lora(self, lora: LoraConfig) -> None:
        self._refuse_distributed("add_lora")
        super().add_lora(lora)

    def merge_lora(self) -> None:
        self._refuse_distributed("merge_lora")
        super().merge_lora()

    def _to(self, device: torch.device) -> None:
        self.module.to(device)
        self._state.to(device)
        self._set_precision()

    def _refuse_distributed(self, method: str, way_out: str = "call it before distribute") -> None:
        if self._ranks is not None:
            raise InvalidConfig(
                f"{method}: this model is distributed over {self._ranks.size} ranks; {way_out}"
            )
