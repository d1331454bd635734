"""What links carry, by name: the founding text's figures, and what was measured in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CPU_LANES = 24
"""PCIe lanes of a usual consumer's CPU: one device with 16 fits beside it, four need a switch (the founding text)."""


@dataclass(frozen=True)
class Figure:
    """Bandwidth in bytes a second, each direction; latency of a message in seconds."""

    bandwidth: float
    latency: float
    source: str


_TEXT = 'Dive into Deep Learning, "Parameter Servers"'
_NO_LATENCY = "the text counts no latency"
FIGURES: Mapping[str, Figure] = {
    "nvlink": Figure(100e9, 0.0, f"{_TEXT}: up to 100 GB/s across 6 links; {_NO_LATENCY}"),
    "nvlink-lane": Figure(18e9, 0.0, f"{_TEXT}: 300 Gbit/s both ways, around 18 GB/s per link per direction; {_NO_LATENCY}"),
    "pcie3-lane": Figure(1e9, 0.0, f"{_TEXT}: a sixteenth of 16 lanes; {_NO_LATENCY}"),
    "pcie3-x16": Figure(16e9, 0.0, f"{_TEXT}: 16 GB/s; {_NO_LATENCY}"),
    "ethernet-100": Figure(10e9, 50e-6, f"{_TEXT}: 10 GB/s; 50 µs are an assumption for TCP through one switch"),
    "ethernet-10": Figure(1e9, 50e-6, f"{_TEXT}: effectively 1 GB/s; 50 µs are an assumption for TCP through one switch"),
    "ethernet-1": Figure(0.1e9, 50e-6, f"{_TEXT}: effectively 100 MB/s; 50 µs are an assumption for TCP through one switch"),
}
