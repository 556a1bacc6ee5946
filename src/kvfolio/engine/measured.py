"""What was measured of a real cache: every tensor that a transformers model keeps, layer by layer, as plain data.

Knows nothing of torch, and nothing of what the planner expects. ``meta_cache.py`` makes these values.
"""

import math
from dataclasses import dataclass

from kvfolio.errors import UnknownModelError
from kvfolio.spec.formats import format_of_dtype


@dataclass(frozen=True, slots=True)
class MeasuredTensor:
    """One tensor of one sequence. ``name`` is its place in the cache layer: ``keys``, ``conv_states.0``, …"""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's word without "torch."

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the dtype it has; raises UnknownModelError for a dtype whose width is not known."""
        fmt = format_of_dtype(self.dtype)
        if fmt is None:
            raise UnknownModelError(
                f"the cache holds {self.name} in {self.dtype}, whose width is not known: it cannot be verified; "
                "known: floats of 8 to 64 bits"
            )
        return self.numbers * fmt.value_bytes

    @property
    def role(self) -> str:
        """``kv`` (of the text's tokens), ``cross`` (of an encoder's), ``conv``, ``pending`` or ``state``."""
        parts = self.name.split(".")
        if parts[0] == "cross":
            return "cross"
        if parts[0] in ("keys", "values", "indexer_keys", "idx_keys", "compressed_kv", "key_states", "value_states"):
            return "kv"
        if parts[0].startswith("conv"):
            return "conv"
        # DeepSeek-V4: tokens that wait until a group of them is compressed.
        return "pending" if parts[0].startswith(("buffer_", "overlap_")) else "state"


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """What one layer holds after one forward. Numbers that are views of each other count once."""

    index: int
    kind_name: str  # class of the cache layer; of the module, where a model keeps the cache on its modules
    tensors: tuple[MeasuredTensor, ...]

    def of_role(self, role: str) -> tuple[MeasuredTensor, ...]:
        """The tensors of one role, in order."""
        return tuple(tensor for tensor in self.tensors if tensor.role == role)

    def numbers_of(self, role: str) -> int:
        """Numbers held in one role."""
        return sum(tensor.numbers for tensor in self.of_role(role))

    @property
    def kv_bytes_16bit(self) -> int:
        """Bytes of keys and values, of text and encoder, at two bytes a number."""
        return 2 * (self.numbers_of("kv") + self.numbers_of("cross"))

    @property
    def state_numbers(self) -> dict[str, int]:
        """Numbers of the states that do not grow, by dtype."""
        found: dict[str, int] = {}
        for tensor in (*self.of_role("state"), *self.of_role("conv")):
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.numbers
        return found

    @property
    def num_bytes(self) -> int:
        """All bytes: keys and values at 16 bits, everything else in the dtype it has."""
        kept = (tensor for tensor in self.tensors if tensor.role not in ("kv", "cross"))
        return self.kv_bytes_16bit + sum(tensor.num_bytes for tensor in kept)


@dataclass(frozen=True, slots=True)
class MeasuredCache:
    """The cache of one sequence after one forward of ``num_tokens`` tokens."""

    class_name: str  # of the model
    attention: str  # sdpa or eager
    transformers_version: str
    num_tokens: int
    encoder_tokens: int  # that cross-attention layers hold; 0: none
    layers: tuple[MeasuredLayer, ...]

    @property
    def kv_bytes_16bit(self) -> int:
        return sum(layer.kv_bytes_16bit for layer in self.layers)

    @property
    def state_numbers(self) -> dict[str, int]:
        """Numbers of the states that do not grow, by dtype."""
        found: dict[str, int] = {}
        for layer in self.layers:
            for dtype, numbers in layer.state_numbers.items():
                found[dtype] = found.get(dtype, 0) + numbers
        return found
