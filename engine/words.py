"""Several named int tensors in one buffer of 32-bit words, so that one copy brings all of them to the device."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loraplex.engine.device import aligned

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Field:
    size: int
    tail: int | None = 0
    """What stands behind the values that are given; None: the last of them again (0 when there is none)."""
    wide: bool = False
    """int64 instead of int32."""


class WordLayout:
    """Where each field lies, in the order of `fields`. Each begins where `aligned` allows."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = dict(fields)
        self._spans: dict[str, tuple[int, int]] = {}
        self.num_words = 0
        for name, field in self._fields.items():
            end = self.num_words + field.size * (2 if field.wide else 1)
            self._spans[name] = self.num_words, end
            self.num_words = aligned(end)

    def views(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as tensors over an int32 buffer of at least `num_words`."""
        return {
            name: words[start:end].view(torch.int64) if self._fields[name].wide else words[start:end]
            for name, (start, end) in self._spans.items()
        }

    def fill(self, words: torch.Tensor, values: Mapping[str, Ints]) -> None:
        """Writes all fields of a host buffer; `values` has each of them."""
        for name, view in self.views(words).items():
            given, out, tail = values[name], view.numpy(), self._fields[name].tail
            assert len(given) <= len(out), (name, len(given), len(out))
            out[: len(given)] = given
            out[len(given) :] = tail if tail is not None else given[-1] if len(given) else 0

    def clear(self, words: torch.Tensor) -> None:
        """Makes all fields of a host buffer tail."""
        self.fill(words, dict.fromkeys(self._fields, np.zeros(0, dtype=np.int64)))
