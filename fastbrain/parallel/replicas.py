"""A whole model on every rank (DistributedDataParallel): gradients are summed once a step."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fastbrain.parallel.ranks import Ranks
from fastbrain.transformer import Transformer


def replicate(module: Transformer, ranks: Ranks) -> DistributedDataParallel:
    """Wrap a module, on its rank's device, whose weights become those of the first rank.

    A forward and backward through the result leaves the sum of the ranks' gradients in the
    module's parameters, in FP32; under the result's `no_sync()` they stay apart, and are summed by
    the next one outside of it. Gradients lie in the buckets that are sent, so they should be zeroed
    and not dropped.
    """
    # rotary tables are functions of the configuration; the argument has another name since 2.13
    names = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: False}
    net = DistributedDataParallel(module, process_group=ranks.group, **options)
    net.register_comm_hook(ranks.group, _sum)
    _settle(net, ranks)
    return net


def _sum(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Sums a bucket over the ranks; by itself DDP would divide by their number."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    done: Future[Tensor] = work.get_future().then(lambda reduced: reduced.value()[0])
    return done


def _settle(net: DistributedDataParallel, ranks: Ranks) -> None:
    """Make DDP cut its buckets for good.

    It cuts them anew after the first backward, in the order in which gradients came; and where in
    a bucket a gradient lies may decide in which order the ranks' values are added. A run that goes
    on has to add as the one before did, so both begin with a backward that counts for nothing.
    """
    # a multiple of 16 where there can be one, for which kernels are compiled anyway
    length = min(16, net.module.config.max_seq_len)
    ids = torch.zeros(1, length, dtype=torch.int64, device=ranks.device)
    for _ in range(2):
        loss, _, auxiliary = net(ids, targets=ids, mask=ids == 0, max_rows=length)
        (0 * (loss + auxiliary)).backward()
        net.zero_grad(set_to_none=False)
