"""From a command line to what is to be measured, before anything slow is imported.

Widths that are not given follow from `d_model`, as in the reference system: heads of 64 channels, a
quarter as many key-value heads, d_ff of 11/4 and moe_d_ff of 11/16 of `d_model`, mixtures of
experts from layer 2 on.
"""

import argparse
from dataclasses import dataclass

from fastbrain.config import TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.plan.links import Link

# the fewest timed steps whose median and spread mean something
FEWEST_STEPS = 5
DEFAULT_TOKENS = 50 * 10**9


@dataclass(frozen=True)
class Request:
    """One configuration to measure.

    Attributes:
        config: the shape of the model.
        batch: sequences of a step.
        seq: tokens of a sequence.
        device: "cpu", "cuda" or "cuda:N"; None is the first card, or the CPU where there is none.
        mixed_precision: BF16 operands; None is yes on CUDA and no on the CPU.
        steps: timed ones.
        tokens: of the run whose days are foretold.
        budget_mib: MiB that may be used; 0 is no limit.
        json: whether one JSON object is printed in place of the line.
        notes: what the user should know of the shape before it is measured.
        ranks: devices that are to train together, of which this one is measured.
        parallel: "auto", "ddp" or "fsdp".
        link: between the ranks; None is the usual one.
    """

    config: TransformerConfig
    batch: int
    seq: int
    device: str | None = None
    mixed_precision: bool | None = None
    steps: int = FEWEST_STEPS
    tokens: int = DEFAULT_TOKENS
    budget_mib: int = 0
    json: bool = False
    notes: tuple[str, ...] = ()
    ranks: int = 1
    parallel: str = "auto"
    link: Link | None = None

    @property
    def label(self) -> str:
        """The shape in short, in the reference system's words."""
        c = self.config
        kind = f"moe{c.num_experts}x{c.experts_per_token}" if c.moe_layers else "dense"
        size = f"v{c.vocab_size} d{c.d_model} L{c.n_layers}"
        return f"{size} {self.batch}x{self.seq} {kind}"


def request_of(options: argparse.Namespace) -> Request:
    """What these parsed arguments ask for.

    Raises:
        InvalidConfig: they are no valid shape, or contradict each other.
    """
    built, notes = config_of(options), []
    if options.moe and not built.moe_layers:
        notes.append(
            f"layers is {options.layers} and the experts begin at layer 2, so this model is "
            "dense: pass --moe-start 0 for experts in every layer"
        )
    return Request(
        config=built,
        batch=options.batch,
        seq=options.seq,
        device=options.device,
        mixed_precision=options.mixed_precision,
        steps=options.steps,
        tokens=options.tokens,
        budget_mib=options.budget_mib,
        json=options.json,
        notes=tuple(notes),
        ranks=options.ranks,
        parallel=options.parallel or "auto",
        link=options.link,
    )


def config_of(options: argparse.Namespace) -> TransformerConfig:
    """The model of these parsed arguments, with what they leave open derived from `d_model`.

    Raises:
        InvalidConfig: they are no valid shape, or contradict each other.
    """
    _refuse_contradictions(options)
    d_model, head_dim = options.d_model, options.head_dim or 64
    if options.heads is None and d_model % head_dim:
        raise InvalidConfig(
            f"d_model is {d_model}, which is not a multiple of the head width of {head_dim}, so "
            "the number of heads does not follow from it: pass --heads, or a d_model such as "
            f"{max(1, round(d_model / head_dim)) * head_dim}"
        )
    heads = options.heads or d_model // head_dim
    kv_heads = options.kv_heads or max(heads // 4, 1)
    if heads % kv_heads:
        whence = "as asked for" if options.kv_heads else "a quarter of the heads"
        nearest = next(n for n in range(min(kv_heads, heads), 0, -1) if heads % n == 0)
        raise InvalidConfig(
            f"{kv_heads} key-value heads ({whence}) do not divide the {heads} heads: pass "
            f"--kv-heads with a divisor, such as {nearest}"
        )
    optional = {
        "rope_base": options.rope_base,
        "rope_scaling": options.rope_scaling,
        "rmsnorm_eps": options.rmsnorm_eps,
        "aux_loss_weight": options.aux_loss_weight,
        "router_z_loss_weight": options.router_z_loss_weight,
    }
    return TransformerConfig(
        vocab_size=options.vocab,
        d_model=d_model,
        n_layers=options.layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        d_ff=options.d_ff or d_model * 11 // 4,
        moe_d_ff=options.moe_d_ff or d_model * 11 // 16,
        num_experts=options.experts,
        experts_per_token=options.top_k,
        moe_layers=_moe_layers(options),
        shared_expert=not options.no_shared_expert,
        max_seq_len=options.max_seq_len or max(options.seq, 256),
        tie_embeddings=not options.untied,
        **{name: value for name, value in optional.items() if value is not None},
    )


def _refuse_contradictions(options: argparse.Namespace) -> None:
    if not options.moe:
        idle = {
            "--moe-start": options.moe_start is not None,
            "--moe-layers": options.moe_layers is not None,
            "--moe-d-ff": options.moe_d_ff is not None,
            "--no-shared-expert": options.no_shared_expert,
            "--aux-loss-weight": options.aux_loss_weight is not None,
            "--router-z-loss-weight": options.router_z_loss_weight is not None,
        }
        for flag in (flag for flag, given in idle.items() if given):
            raise InvalidConfig(
                f"{flag} says something of experts, and moe is 0, a dense model: leave {flag} "
                "out, or pass 1 for moe"
            )
    if options.moe_start is not None and options.moe_start >= options.layers:
        raise InvalidConfig(
            f"--moe-start is {options.moe_start}, but layers is {options.layers}, so the last "
            f"layer is {options.layers - 1}: start no later, or pass 0 for moe"
        )
    for name in ("parallel", "link") if options.ranks == 1 else ():
        if getattr(options, name) is not None:
            raise InvalidConfig(
                f"--{name} says something of several ranks, and there is one: add --ranks 2, or "
                f"leave --{name} out"
            )
    if options.seq < 2:
        raise InvalidConfig("seq must be at least 2, one token to predict the other from; got 1")
    if options.max_seq_len is not None and options.max_seq_len < options.seq:
        raise InvalidConfig(
            f"--max-seq-len is {options.max_seq_len}, shorter than seq, which is {options.seq}: "
            "raise it, or leave it out"
        )


def _moe_layers(options: argparse.Namespace) -> tuple[int, ...]:
    if not options.moe:
        return ()
    if options.moe_layers is not None:
        return tuple(options.moe_layers)
    start = 2 if options.moe_start is None else options.moe_start
    return tuple(range(start, options.layers))
