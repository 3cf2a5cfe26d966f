"""The links between cards that a plan can be made for: what each carries, and how that is known.

A link is the slowest one on the ring that the ranks form: between machines that is the network,
however the cards inside of them are joined. Cards without peer-to-peer copies, as GeForce cards are
since the RTX 30 series, go through the host's memory; their PCIe slot carries each byte once, too.
"""

import math
from dataclasses import dataclass

from fastbrain.errors import InvalidConfig
from fastbrain.plan.cards import Card


@dataclass(frozen=True)
class Link:
    """A connection of one rank with the next.

    Attributes:
        key: what a command line calls it.
        name: what a table calls it.
        nominal_gb_per_s: 1e9 bytes per second in each direction, by the standard.
        efficiency: of that, what a ring of large messages is taken to reach.
        source: of both figures.
    """

    key: str
    name: str
    nominal_gb_per_s: float
    efficiency: float
    source: str

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes per second in each direction, as a plan reckons."""
        return self.nominal_gb_per_s * self.efficiency


def _pcie(key: str, generation: int, lanes: int) -> Link:
    # 8 gigatransfers a second and lane in generation 3, doubled by each; 128 of 130 bits are data
    nominal = 2 ** (generation - 3) * lanes * 128 / 130
    return Link(
        key,
        f"PCIe {generation}.0 x{lanes}",
        nominal,
        0.7,
        f"{8 * 2 ** (generation - 3)} GT/s on {lanes} lanes in 128b/130b code; 0.7 of it assumed, "
        "for packet headers and copies through the host's memory",
    )


def _ethernet(gigabits: float, efficiency: float) -> Link:
    return Link(
        f"ethernet{gigabits:g}",
        f"Ethernet {gigabits:g} Gbit/s",
        gigabits / 8,
        efficiency,
        f"{gigabits:g} Gbit/s; {efficiency:g} of it assumed, for TCP over sockets",
    )


LINKS = {
    link.key: link
    for link in (
        _pcie("pcie3x8", 3, 8),
        _pcie("pcie4x8", 4, 8),
        _pcie("pcie4x16", 4, 16),
        Link(
            "nvlink",
            "NVLink bridge of two RTX 3090",
            56.25,
            0.8,
            "4 links of 14.0625 GB/s (NVIDIA's GA102 white paper); 0.8 of it assumed",
        ),
        _ethernet(1, 0.9),
        _ethernet(2.5, 0.9),
        _ethernet(10, 0.9),
        _ethernet(25, 0.8),
        _ethernet(100, 0.8),
    )
}
# two cards in a consumer board share the lanes of one; CPUs that train together are machines
USUAL_LINK, USUAL_CPU_LINK = "pcie4x8", "ethernet1"


def usual_link(card: Card) -> Link:
    """The link that is meant where none is named."""
    return LINKS[USUAL_CPU_LINK if card.is_cpu else USUAL_LINK]


def find_link(name: str | float) -> Link:
    """The link of this key, or one that carries so many GB/s in each direction.

    Raises:
        InvalidConfig: there is none; the message names those there are.
    """
    key = str(name).lower().translate({ord(each): None for each in " -_"}).replace(".0x", "x")
    if key in LINKS:
        return LINKS[key]
    try:
        # before any sign is taken out of it
        rate = float(name)
    except ValueError:
        rate = math.nan
    if isinstance(name, bool) or not 0 < rate < math.inf:
        raise InvalidConfig(
            f"link {name!r} is not known: choose among {', '.join(LINKS)}, or give the GB/s that "
            "it carries in each direction, a number above 0"
        )
    return Link(f"{rate:g}", f"{rate:g} GB/s", rate, 1.0, "as given")
