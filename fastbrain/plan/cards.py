"""The cards that a plan can be made for: their peaks as the maker states them.

Tensor rates are dense, with BF16 operands and FP32 sums; on GeForce cards that is half of what the
advertised rate with FP16 sums would be. Sources: NVIDIA's GA102, Ada, A100 and H100 architecture
white papers and the H200 data sheet; the home card's 25.5 TFLOPS is 28 SMs x 512 multiply-adds x
1.78 GHz.
"""

from dataclasses import dataclass

from fastbrain.errors import InvalidConfig
from fastbrain.plan.machine import cuda_name, measured_cpu, measured_cuda

_GIB = 2**30

THIS_MACHINE = "this-machine"
HOME = "rtx3060"


# what cuBLAS reaches of the tensor peak on the home card: see the table of rates
PRODUCT_SHARE = 0.91


@dataclass(frozen=True)
class Card:
    """One card, or a CPU.

    Attributes:
        key: what a command line calls it.
        name: what a table calls it.
        sms: multiprocessors; of a CPU, the threads PyTorch uses.
        boost_mhz: boost clock; 0 where it is unknown.
        tensor_flops: peak operations per second in BF16 with FP32 sums.
        fp32_flops: peak operations per second in FP32.
        bytes_per_s: nominal memory bandwidth.
        memory_bytes: of the card, or of the machine; 0 where it is unknown.
        kernel_share: what our kernels are taken to keep, on this card, of the share of the peak
            that their machine code reaches on the home card; 1 where multiprocessors are the same.
        product_share: of its peak that the vendor's matrix products reach.
        is_cpu: whether it is one.
    """

    key: str
    name: str
    sms: int
    boost_mhz: int
    tensor_flops: float
    fp32_flops: float
    bytes_per_s: float
    memory_bytes: int
    kernel_share: float = 1.0
    product_share: float = PRODUCT_SHARE
    is_cpu: bool = False

    @property
    def workspace_bytes(self) -> int:
        """What cuBLAS keeps inside PyTorch's allocator; a CPU's products keep nothing."""
        if self.is_cpu:
            return 0
        return (32 if self.key in ("h100", "h200") else 9) * 2**20

    def flops(self, bf16: bool) -> float:
        """Peak operations per second of products with such operands."""
        return self.tensor_flops if bf16 else self.fp32_flops


CARDS = {
    card.key: card
    for card in (
        Card("rtx3060", "RTX 3060 12 GB", 28, 1777, 25.5e12, 12.75e12, 360e9, 12 * _GIB),
        Card("rtx3090", "RTX 3090", 82, 1695, 71.2e12, 35.6e12, 936e9, 24 * _GIB),
        Card("rtx4060ti", "RTX 4060 Ti 16 GB", 34, 2535, 44.1e12, 22.1e12, 288e9, 16 * _GIB),
        Card("rtx4090", "RTX 4090", 128, 2520, 165.2e12, 82.6e12, 1008e9, 24 * _GIB),
        Card("a100", "A100 80 GB", 108, 1410, 312e12, 19.5e12, 2039e9, 80 * _GIB, 0.6, 0.80),
        Card("h100", "H100 80 GB", 132, 1980, 989e12, 66.9e12, 3350e9, 80 * _GIB, 0.4, 0.65),
        Card("h200", "H200 141 GB", 132, 1980, 989e12, 66.9e12, 4800e9, 141 * _GIB, 0.4, 0.65),
    )
}

# where the last two numbers of a card are from
SHARE_SOURCES = {
    "RTX 30 and RTX 40": "the home card's: their multiprocessors have its tensor rate per clock",
    "A100": "assumed; nothing of ours was simulated or measured there",
    "H100 and H200": (
        "kernels: attention in Triton, 340 to 403 of 989 TFLOPS forward at width 64 on an H100 "
        "(Shah et al., 2024, arXiv 2407.08608); products: assumed"
    ),
}

# as torch.cuda.get_device_name has them; the longest that a name contains is meant
_DEVICE_NAMES = {
    "RTX 3060": "rtx3060",
    "RTX 3090": "rtx3090",
    "RTX 4060 Ti": "rtx4060ti",
    "RTX 4090": "rtx4090",
    "A100": "a100",
    "H100": "h100",
    "H200": "h200",
}
# cards that share a name's beginning and nothing else
_OTHERS = (
    "RTX 3060 Ti",
    "RTX 3060 Laptop",
    "RTX 3090 Ti",
    "RTX 4090 Laptop",
    "RTX 4090 D",
    "H100 PCIe",
    "H100 NVL",
)


def known_card(device_name: str) -> Card | None:
    """The card that PyTorch calls so, such as "NVIDIA GeForce RTX 3060"; None for any other."""
    if any(other in device_name for other in _OTHERS):
        return None
    found = [name for name in _DEVICE_NAMES if name in device_name]
    return CARDS[_DEVICE_NAMES[max(found, key=len)]] if found else None


def find_card(name: str) -> Card:
    """The card of this key, or this machine.

    Raises:
        InvalidConfig: there is none; the message names those there are.
    """
    key = name.lower().translate({ord(each): None for each in " -_"})
    if key == THIS_MACHINE.replace("-", ""):
        return this_machine()
    if key not in CARDS:
        raise InvalidConfig(
            f"card {name!r} is not known: choose among {', '.join(CARDS)}, or {THIS_MACHINE}, "
            "which measures the one at hand"
        )
    return CARDS[key]


def this_machine() -> Card:
    """The CUDA device of this machine if there is one, else its CPU; measured in a second or two.

    A CUDA device of the table has the table's rates.
    """
    name = cuda_name()
    known = known_card(name) if name is not None else None
    if known is not None:
        return known
    found = measured_cpu() if name is None else measured_cuda()
    return Card(
        THIS_MACHINE,
        found.name,
        found.units,
        0,
        found.bf16_flops,
        found.fp32_flops,
        found.bytes_per_s,
        found.memory_bytes,
        # what was measured is what products reach, not a peak
        product_share=1.0,
        is_cpu=name is None,
    )
