"""Copies of blocks as the last checkpoint has them, in the memory that is kept for cuts: who goes back to it reads no disk.

A copy is that of the last cut that was written, or, after a restore, of what was read. The latter is made as for a cut: by the update
that is about to change the block, or by a thread beside. It lasts until the next cut needs its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from psjob.shard.pins import Pin, Voided

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Image:
    """A block as it lies in `file`; `take` gives its tensors, and raises Voided where they are gone."""

    file: str
    take: Callable[[], Tensors]


class Images:
    """By block. All methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._images: dict[int, Image] = {}
        self._kept: dict[int, Image] = {}
        """Those of the cut before, while one is written: what has not changed stays as it is."""
        self._pins: list[Pin] = []

    def find(self, index: int, file: str) -> Tensors | None:
        """A block's tensors as they lie in `file`, where memory has them. They are not to be changed."""
        with self._lock:
            image = self._images.get(index)
        if image is None or image.file != file:
            return None
        try:
            tensors = dict(image.take())
        except Voided:
            return None
        with self._lock:
            if self._images.get(index) is image:
                self._images[index] = _of(file, tensors)  # its pin may be dropped with the state that is replaced now
        return tensors

    def begin_cut(self) -> None:
        """The places of all copies are about to be written over."""
        with self._lock:
            self._kept, self._images = self._images, {}
            pins, self._pins = self._pins, []
        for pin in pins:
            pin.give_up()

    def clear(self) -> None:
        """Nothing is kept any more."""
        self.begin_cut()
        with self._lock:
            self._kept = {}

    def written(self, stay: Iterable[int], made: Mapping[int, tuple[str, Tensors]]) -> None:
        """A cut was written whole: `made` are the copies of its blocks with their files; those in `stay` lie where they did before."""
        with self._lock:
            kept = {index: self._kept[index] for index in stay if index in self._kept}
            self._images = kept | {index: _of(file, tensors) for index, (file, tensors) in made.items()}
            self._kept = {}

    def read(self, pins: Mapping[int, tuple[str, Pin]]) -> None:
        """Blocks were read from files, and are held by pins."""
        with self._lock:
            self._images |= {index: Image(file, pin.take) for index, (file, pin) in pins.items()}
            self._pins = [pin for _, pin in pins.values()]


def _of(file: str, tensors: Tensors) -> Image:
    return Image(file, lambda: tensors)
