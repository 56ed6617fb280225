"""Chapter 12. Hardware for planning: memory, bandwidth, links and efficiency of devices, with sources; `2x3090`, `2x8xH100`, `cpu`.

Peaks of matrix products are in `shared.engine.metrics.flops`. The efficiency is the one constant of a device that no data sheet has: the
share of its peak that the products of a training step reach. It is the same for every layout and model. An A100's is fixed by the first
row of Narayanan et al. 2021, table 1, an H100's by that of torchtitan's table 1 (chapters/12_grpo/PUBLISHED.md); a 3090's is an assumption.

    a device's products        FLOPs / (efficiency * peak)
    reading weights, caches    bytes / bandwidth
    an operation of ranks      latency * messages + bytes / bandwidth of the slowest link on the ring
"""

import re
from dataclasses import dataclass, replace
from functools import cache

import psutil
import torch

from shared.course.errors import SettingError
from shared.engine.metrics.flops import cpu_peak, peak_of
from shared.parallel.planning.costs import Link

RESERVED = 1.5e9  # bytes of a GPU that CUDA, its libraries and the allocator's gaps take
MEASURED = 2**26  # bytes that are copied to measure a CPU's memory


@dataclass(frozen=True)
class Device:
    """A kind of device.

    driver: its name to the driver, by which its peaks are known; empty for this machine's CPU, whose peaks are measured. memory: bytes.
    bandwidth: of that memory, bytes per second. link: between two of a machine. network: bytes per second in and out of a machine.
    efficiency: the share of the peak that a step's products reach.
    """

    driver: str
    memory: float
    bandwidth: float
    link: Link
    network: float
    efficiency: float


NVLINK, NETWORK = 3.4e-6, 1.4e-5  # latencies of a hop: NCCL's own, for its ring with the protocol Simple (tuning.cc); over PCIe 5.7e-6
PCIE_HOST = Link(1e-5, 6e9)  # an assumption: every byte through the host's memory, eight lanes for each card; nccl-tests measure yours
PCIE_P2P = Link(5.7e-6, 25e9)  # PCI-SIG: 16 lanes of PCIe 4.0 carry 31.5 GB/s; four fifths of it
ETHERNET = 1.25e9  # 10 Gb/s
RTX_3090 = "NVIDIA GeForce RTX 3090"

DEVICES = {
    # NVIDIA, "Ampere GA102 GPU Architecture" white paper, table 9: 24 GB, 936 GB/s. GeForce cards have no peer access over PCIe.
    "3090": Device(RTX_3090, 24e9, 936e9, PCIE_HOST, ETHERNET, 0.4),
    "3090-p2p": Device(RTX_3090, 24e9, 936e9, PCIE_P2P, ETHERNET, 0.4),  # with a driver that allows peer access
    # The same paper, "Third-Generation NVLink": four links, 56.25 GB/s in each direction.
    "3090-nvlink": Device(RTX_3090, 24e9, 936e9, Link(NVLINK, 56.25e9), ETHERNET, 0.4),
    # NVIDIA, "Ada GPU Architecture" white paper, appendix A: 24 GB, 1,008 GB/s; no NVLink.
    "4090": Device("NVIDIA GeForce RTX 4090", 24e9, 1008e9, PCIE_HOST, ETHERNET, 0.4),
    # NVIDIA A100 data sheet, SXM: 1,555 and 2,039 GB/s, NVLink 600 GB/s in both directions. DGX A100: eight InfiniBand links of 200 Gb/s.
    "A100-40GB": Device("A100-SXM4-40GB", 40e9, 1555e9, Link(NVLINK, 300e9), 200e9, 0.456),
    "A100": Device("A100-SXM4-80GB", 80e9, 2039e9, Link(NVLINK, 300e9), 200e9, 0.456),
    # NVIDIA H100 data sheet, SXM: 80 GB, 3.35 TB/s, NVLink 900 GB/s in both directions. DGX H100: eight InfiniBand links of 400 Gb/s.
    "H100": Device("NVIDIA H100", 80e9, 3350e9, Link(NVLINK, 450e9), 400e9, 0.393),
    # NVIDIA H200 data sheet, SXM: 141 GB, 4.8 TB/s; links as the H100's.
    "H200": Device("NVIDIA H200", 141e9, 4800e9, Link(NVLINK, 450e9), 400e9, 0.393),
}
CPU = "cpu"
MOST_CARDS = 1_000_000  # of hardware that is planned for: a search goes through all ways to divide them
CPU_EFFICIENCY = 0.5
CPU_LINK = Link(1e-4, 2e9)  # an assumption for gloo between processes of a machine


@dataclass(frozen=True)
class Hardware:
    """Machines with equal cards. cards: in each machine; for a CPU as many as the layout has ranks, which share it."""

    name: str
    device: Device
    machines: int = 1
    cards: int = 1

    @property
    def ranks(self) -> int:
        return self.machines * self.cards

    @property
    def is_cpu(self) -> bool:
        return not self.device.driver

    @property
    def usable(self) -> float:
        """Bytes of a card's memory that a run can use."""
        return self.device.memory - (0 if self.is_cpu else RESERVED)

    def shared_by(self, ranks: int) -> "Hardware":
        """The hardware of one rank. A CPU is divided among the ranks.

        Raises:
            SettingError: more ranks than cards.
        """
        if self.is_cpu:
            mine = replace(self.device, memory=self.device.memory / ranks, bandwidth=self.device.bandwidth / ranks)
            return replace(self, device=mine, cards=ranks)
        if ranks > self.ranks:
            cards = "card" if self.ranks == 1 else "cards"
            raise SettingError(
                f"The layout has {ranks} ranks and {self.name} has {self.ranks} {cards}: give a smaller layout, or more cards, such as "
                f"--hardware {ranks}x{self.name.rpartition('x')[2]}."
            )
        return self

    def peak(self, precision: str) -> float:
        """Peak FLOP/s of a rank's matrix products."""
        if self.is_cpu:
            return cpu_peak(getattr(torch, precision)) / self.cards
        return peak_of(self.device.driver, getattr(torch, precision))

    def speed(self, precision: str) -> float:
        """Achieved FLOP/s: efficiency x peak."""
        return self.device.efficiency * self.peak(precision)

    def link(self, stride: int, ranks: int) -> Link:
        """The slowest link of a ring of so many ranks, each `stride` ranks from the next. Between machines, the ring has its share of the
        network, because the machine's other cards are in rings of their own."""
        if self.machines == 1 or stride * ranks <= self.cards:
            return self.device.link
        together = max(self.cards // stride, 1)  # of the ring's ranks that are in one machine
        return Link(NETWORK, min(self.device.link.bandwidth, self.device.network * min(together / self.cards, 1)))


@cache
def this_cpu() -> Device:
    """This machine's CPU, its memory's bandwidth measured."""
    from timeit import repeat

    source, target = torch.empty(MEASURED // 4).fill_(1), torch.empty(MEASURED // 4)
    seconds = min(repeat(lambda: target.copy_(source), number=1, repeat=5))
    return Device("", psutil.virtual_memory().total, 2 * MEASURED / seconds, CPU_LINK, ETHERNET, CPU_EFFICIENCY)


def parse_hardware(word: str) -> Hardware:
    """`3090`, `2x3090-nvlink`, `2x8xH100` (machines x cards), `cpu`.

    Raises:
        SettingError: a device that is not in the table.
    """
    if word.lower() == CPU:
        return Hardware(CPU, this_cpu())
    match = re.fullmatch(r"(?:(\d{1,12})x)?(?:(\d{1,12})x)?([^x].*)", word)
    *counts, name = match.groups() if match else (None, None, word)
    known = {each.lower(): each for each in DEVICES}
    if name.lower() not in known or "0" in counts:
        raise SettingError(
            f"There is no hardware {word!r}: give machines x cards x device, such as 2x3090, 2x8xH100 or cpu. Devices are "
            f"{', '.join(DEVICES)}."
        )
    numbers = [int(each) for each in counts if each is not None]
    machines, cards = ([1, 1, *numbers])[-2:]
    if machines * cards > MOST_CARDS:
        raise SettingError(f"The hardware {word} has {machines * cards:,} cards: give at most {MOST_CARDS:,}.")
    return Hardware(word, DEVICES[known[name.lower()]], machines, cards)


def hardware_here() -> Hardware:
    """The cards of this machine, or else its CPU.

    Raises:
        SettingError: cards that are not in the table.
    """
    if not torch.cuda.is_available():
        return parse_hardware(CPU)
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    size = torch.cuda.get_device_properties(0).total_memory
    found = [word for word, device in DEVICES.items() if device.driver in name or name in device.driver]
    if not found:
        raise SettingError(f"{name} is not in the planner's table: give --hardware with one of {', '.join(DEVICES)}.")
    nearest = min(found, key=lambda word: abs(DEVICES[word].memory - size))
    return Hardware(f"{count}x{nearest}", DEVICES[nearest], 1, count)
