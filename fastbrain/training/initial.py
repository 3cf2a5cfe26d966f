"""The model that a run begins with: fresh weights of its seed, or those of another model.

A run that never came to a checkpoint, or goes back to its start, begins with the same bits again.
"""

import dataclasses
import hashlib

import torch

from fastbrain.errors import InvalidConfig, InvalidSnapshot
from fastbrain.lm import TransformerLm
from fastbrain.optim import Optimizer
from fastbrain.parallel.shards import fill
from fastbrain.training.pretrained import Pretrained, open_pretrained
from fastbrain.training.settings import Settings, shape

# what a run may choose for itself; all else is as the model it begins from has it
_FREE = (
    "max_seq_len", "rope_base", "rope_scaling", "aux_loss_weight", "router_z_loss_weight", "lora",
)  # fmt: skip


def open_base(settings: Settings) -> Pretrained:
    """The model that `train.init` names, adapters merged.

    Raises:
        InvalidSnapshot: it is not the one that the run began with.
        FastBrainError: as `open_pretrained`.
    """
    assert settings.train.init is not None
    base = open_pretrained(settings.train.init)
    if base.model.config.lora is not None:
        base.model.merge_lora()
    for name, tensor in base.model.weights():
        if not bool(tensor.isfinite().all()):
            raise InvalidSnapshot(
                f"{base.source}: {name} holds values that are not finite numbers, and no run can "
                "begin from them"
            )
    known = settings.train.init_sha256
    if known is not None and known != (found := weights_sha256(base.model)):
        raise InvalidSnapshot(
            f"{settings.train.init} is not the model that this run began with: the digest of its "
            f"weights is {found}, and was {known}; put the old one back, or begin another run"
        )
    if settings.data.kind == "instructions" and base.files is None and not settings.data.tokenizer:
        raise InvalidConfig(
            f"{base.source} has no tokenizer beside it, and instructions need one: give "
            "data.tokenizer, the tokenizer.json that it was trained with"
        )
    return base


def inherit(settings: Settings, base: TransformerLm) -> Settings:
    """The settings with the shape of the model they begin from, and the digest of its weights.

    Raises:
        InvalidConfig: [model] asks for another shape; names both values.
    """
    wanted = shape({**vars(base.config), **settings.model})
    for name in settings.model:
        before, after = getattr(base.config, name), getattr(wanted, name)
        if name not in _FREE and before != after:
            raise InvalidConfig(
                f"model.{name} is {after}, and the model in train.init has {before}: leave it out, "
                "or train a model of that shape from the start"
            )
    return settings.with_model(wanted).with_train(init_sha256=weights_sha256(base))


def fresh(settings: Settings) -> TransformerLm:
    """A model of a run's shape with weights of its seed, on the CPU; everything is decided."""
    train = settings.train
    config = settings.config(settings.model["vocab_size"])
    mixed = train.precision == "bf16-mixed"
    return TransformerLm(config, _optimizer(settings), train.seed, mixed)


def build(settings: Settings, base: TransformerLm | None = None) -> TransformerLm:
    """The model of a run as it begins, on the CPU.

    Args:
        settings: everything decided.
        base: of `train.init`, where it is open already; it may become the result.
    """
    if settings.train.init is None:
        return fresh(settings)
    config = settings.config(settings.model["vocab_size"])
    base = base or open_base(settings).model
    plain = dataclasses.replace(config, lora=None)
    model = base
    if base.config != plain:
        # the same tensors under another rotary table or other weights of the routing losses
        model = TransformerLm(plain, seed=0)
        copy_weights(base, model)
        model.quantized_file = base.quantized_file
    model.optimizer = _optimizer(settings)
    model.set_optimizer_step(0)
    model.set_mixed_precision(settings.train.precision == "bf16-mixed")
    if config.lora is not None:
        model.add_lora(config.lora)
    return model


def _optimizer(settings: Settings) -> Optimizer:
    train = settings.train
    return Optimizer.adam(
        train.learning_rate,
        betas=train.betas,
        weight_decay=train.weight_decay,
        decay_vectors=False,
    )


def copy_weights(source: TransformerLm, target: TransformerLm) -> None:
    """Copy the weights of a model into another of its shape, of which a rank may have a part."""
    own = dict(target.module.named_parameters())
    for name, values in source.module.named_parameters():
        fill(own[name], values.detach())


def weights_sha256(model: TransformerLm) -> str:
    """A digest of the weights, whatever file they came in."""
    digest = hashlib.sha256()
    for name, tensor in model.weights():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
