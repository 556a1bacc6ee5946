"""Holds the plan of a model against the cache that transformers' own class leaves: layer by layer, to the byte.

A difference is explained by name or it is not explained. Does not know how a cache is measured
(``meta_cache.py``); needs torch and transformers only once ``verify`` is called.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvfolio.engine.measured import MeasuredCache, MeasuredLayer
from kvfolio.errors import OptionError, UnknownModelError
from kvfolio.spec.formats import BF16, F32, CacheFormat, format_of_dtype
from kvfolio.spec.layers import (
    CompressedSparse,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    LayerMemory,
    NoCache,
    RecurrentState,
    parts_of,
)
from kvfolio.spec.model import ModelSpec

# Scans that transformers runs token by token in Python: a longer text takes minutes and shows nothing more.
_LOOPS = ("mamba", "rg_lru", "rwkv")
_LOOP_TOKENS = 64
# Classes that store keys and values once for every query head, repeated from the heads that the weights have.
_EXPANDING = ("falcon",)
# Classes whose window is that of the config and the query itself.
_COUNTING_THE_QUERY = ("mimo_v2_flash",)
# Classes that keep every token of a layer whose queries read a window only.
_KEEPING = ("gpt_neo",)
# Classes that put tokens of their own in front of the text.
_PREFIXED = ("cpmant",)
_FMT = CacheFormat(BF16, BF16)


@dataclass(frozen=True, slots=True)
class Difference:
    """One reason why a layer's measured bytes are not the planned ones."""

    reason: str
    num_bytes: int  # measured less planned
    explained: bool


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """One layer: what was planned, what was found. Keys and values at 16 bits, states in the dtype they have."""

    index: int
    planned_kind: str
    measured_kind: str  # class name of the cache layer
    planned_bytes: int
    measured_bytes: int
    differences: tuple[Difference, ...]

    @property
    def explained(self) -> bool:
        """Whether nothing differs for an unknown reason."""
        return all(difference.explained for difference in self.differences)


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome. ``not_verified`` says why nothing could be measured; the layers are empty then."""

    model_type: str
    num_tokens: int  # that passed: fewer than asked where the class loops over tokens in Python
    measured: MeasuredCache | None
    layers: tuple[LayerCheck, ...]
    not_verified: str | None = None

    @property
    def verdict(self) -> bool | None:
        """True: equal, or every difference has a name. False: some have none. None: not verified."""
        return None if self.measured is None else all(layer.explained for layer in self.layers)

    @property
    def planned_bytes(self) -> int:
        return sum(layer.planned_bytes for layer in self.layers)

    @property
    def measured_bytes(self) -> int:
        return sum(layer.measured_bytes for layer in self.layers)

    def differences(self) -> tuple[tuple[Difference, int], ...]:
        """Every reason with its bytes over all layers, and the number of layers, in order of first appearance."""
        found: dict[tuple[str, bool], tuple[int, int]] = {}
        for layer in self.layers:
            for difference in layer.differences:
                key = difference.reason, difference.explained
                num_bytes, count = found.get(key, (0, 0))
                found[key] = num_bytes + difference.num_bytes, count + 1
        return tuple((Difference(why, size, known), count) for (why, known), (size, count) in found.items())


def verify(spec: ModelSpec, config: Mapping[str, object], num_tokens: int) -> Verification:
    """Hold ``spec`` against transformers' own cache for ``config``, the ``config.json`` that it was read from.

    The model is built on the meta device and sees ``num_tokens`` tokens of one sequence. Where transformers has no
    class for it, the outcome says so and is no error. Raises OptionError where transformers is not installed.
    """
    try:
        from kvfolio.engine.meta_cache import measure_cache
    except ImportError as error:
        raise OptionError(f"verify needs torch and transformers ({error}); pip install 'kvfolio[run]'") from error
    parts = [part for layer in spec.layers for part in parts_of(layer)]
    if any(isinstance(part, RecurrentState) and part.mechanism in _LOOPS for part in parts):
        num_tokens = min(num_tokens, _LOOP_TOKENS)
    try:
        try:
            measured = measure_cache(config, num_tokens)
        except UnknownModelError:
            if spec.max_context is None or num_tokens <= spec.max_context:
                raise
            num_tokens = spec.max_context  # where positions come from a table of that length
            measured = measure_cache(config, num_tokens)
    except UnknownModelError as error:
        return Verification(spec.model_type, num_tokens, None, (), f"{error}: not verified")
    if not any(layer.tensors for layer in measured.layers) and any(part.kind != "none" for part in parts):
        why = f"{measured.class_name} of transformers {measured.transformers_version} keeps no cache: not verified"
        return Verification(spec.model_type, num_tokens, None, (), why)
    return Verification(spec.model_type, num_tokens, measured, check_layers(spec, measured))


def check_layers(spec: ModelSpec, measured: MeasuredCache) -> tuple[LayerCheck, ...]:
    """Every layer that was planned or found; one that is missing on either side counts as one that holds nothing."""
    found = {layer.index: layer for layer in measured.layers}
    checks = []
    for index in range(max(len(spec.layers), max(found, default=-1) + 1)):
        planned = spec.layers[index] if index < len(spec.layers) else NoCache()
        layer = found.get(index, MeasuredLayer(index, "no layer", ()))
        checks.append(_Check(spec, planned, layer, measured).outcome())
    return tuple(checks)


class _Check:
    """One layer's comparison, one kind of memory after the other."""

    def __init__(self, spec: ModelSpec, planned: LayerKind, layer: MeasuredLayer, measured: MeasuredCache) -> None:
        self._spec, self._planned, self._layer, self._measured = spec, planned, layer, measured
        self._num_tokens = measured.num_tokens
        self._differences: list[Difference] = []

    def outcome(self) -> LayerCheck:
        parts = parts_of(self._planned)
        states = [part for part in parts if isinstance(part, RecurrentState)]
        crosses = [part for part in parts if isinstance(part, CrossAttention)]
        tokens = [part for part in parts if not isinstance(part, RecurrentState | CrossAttention)]
        kv, cross = 2 * self._layer.numbers_of("kv"), 2 * self._layer.numbers_of("cross")
        if crosses and not tokens:  # a layer of its own for the image: what it holds are the image's tokens
            kv, cross = 0, kv + cross
        self._check_tokens(tokens, kv)
        self._check_cross(crosses, cross)
        self._check_states(states)
        self._check_pending(parts)
        planned_bytes = self._planned.bytes_at(self._num_tokens, _FMT)
        return LayerCheck(
            self._layer.index,
            self._planned.kind,
            self._layer.kind_name,
            planned_bytes,
            self._layer.num_bytes,
            tuple(self._differences),
        )

    def _note(self, reason: str, num_bytes: int) -> None:
        self._differences.append(Difference(reason, num_bytes, explained=True))

    def _unexplained(self, what: str, num_bytes: int) -> None:
        self._differences.append(Difference(f"UNEXPLAINED: {what}", num_bytes, explained=False))

    def _check_tokens(self, parts: Sequence[LayerKind], measured: int) -> None:
        planned = sum(part.bytes_at(self._num_tokens, _FMT) for part in parts)
        if measured == planned:
            self._check_window(parts)
            return
        for reason, expected in self._conventions(parts, planned):
            if measured == expected:
                self._note(reason, measured - planned)
                return
        self._unexplained(f"keys and values: measured {measured:,} B, planned {planned:,} B", measured - planned)

    def _check_window(self, parts: Sequence[LayerKind]) -> None:
        """Equal bytes behind a window mean unequal windows: transformers keeps one token less than its own."""
        if self._layer.kind_name == "DynamicLayer" or not any(self._has_passed(part) for part in parts):
            return
        what = "the window of transformers is one token longer than the planned one"
        if self._spec.model_type in _COUNTING_THE_QUERY:
            self._note(f"{what}: it counts the query beside the window", 0)
        else:
            self._unexplained(what, 0)

    def _conventions(self, parts: Sequence[LayerKind], planned: int) -> list[tuple[str, int]]:
        """(reason, bytes) of the ways in which transformers is known to store the same layer."""
        passed = sum(part.token_bytes(_FMT) for part in parts if self._has_passed(part))
        less_one = planned - passed
        window = "a window layer keeps window - 1 tokens between steps in transformers"
        ways = [(window, less_one)]
        heads = sum(part.num_kv_heads for part in parts if isinstance(part, FullAttention))
        if heads and self._spec.model_type in _EXPANDING:
            ratio = self._spec.num_q_heads // heads
            ways.append((f"{self._measured.class_name} stores keys and values {ratio} times", planned * ratio))
        token = sum(part.token_bytes(_FMT) for part in parts)
        if self._spec.model_type in _KEEPING:
            ways.append((f"{self._measured.class_name} keeps every token", token * self._num_tokens))
        keys = self._layer.of_role("kv")[:1]
        if self._spec.model_type in _PREFIXED and keys:
            held = keys[0].shape[-2]
            own = held - self._num_tokens
            ways.append((f"{self._measured.class_name} puts {own} tokens of its own in front", token * held))
        if any(isinstance(part, LatentAttention) for part in parts):
            expanded = sum(part.naive_token_bytes(_FMT) for part in parts) * self._num_tokens
            ways.append(("the latent is stored expanded, as keys and values of every head", expanded))
        if all(_is_one_vector(part) for part in parts):
            ways.append(("the vector that is key and value at once is stored twice", 2 * less_one))
        return ways

    def _has_passed(self, part: LayerMemory) -> bool:
        horizon = part.horizon()
        return horizon is not None and self._num_tokens >= horizon

    def _check_cross(self, parts: list[CrossAttention], measured: int) -> None:
        planned = sum(part.fixed_bytes(_FMT) for part in parts)
        given = self._measured.encoder_tokens
        if measured == planned:
            return
        if measured == given * sum(part.token_bytes(_FMT) for part in parts):
            counted = sum(part.encoder_tokens for part in parts)
            self._note(f"{given:,} encoder tokens were given, {counted:,} are planned", measured - planned)
            return
        found = f"measured {measured:,} B for {given:,} encoder tokens, planned {planned:,} B"
        self._unexplained(f"keys and values of the encoder: {found}", measured - planned)

    def _check_states(self, states: list[RecurrentState]) -> None:
        for role, planned, fmt in (
            ("state", sum(state.state_numbers for state in states), states[0].state_format if states else F32),
            ("conv", sum(state.conv_numbers for state in states), states[0].conv_format if states else F32),
        ):
            tensors = self._layer.of_role(role)
            found = sum(tensor.numbers for tensor in tensors)
            # The last axis of a convolution is the kernel's: one column more than the inputs that are still needed.
            column = sum(tensor.numbers // tensor.shape[-1] for tensor in tensors) if role == "conv" else 0
            name = "convolution" if role == "conv" else "state"
            if found not in (planned, planned + column):
                num_bytes = sum(tensor.num_bytes for tensor in tensors) - planned * fmt.value_bytes
                self._unexplained(f"{name}: measured {found:,} numbers, planned {planned:,}", num_bytes)
                continue
            if found != planned:
                reason = "transformers keeps kernel columns of the convolution, not kernel - 1"
                self._note(reason, column * fmt.value_bytes)
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                if format_of_dtype(dtype) != fmt:
                    same = [tensor for tensor in tensors if tensor.dtype == dtype]
                    num_bytes = sum(tensor.num_bytes - tensor.numbers * fmt.value_bytes for tensor in same)
                    self._note(f"the {name} is {dtype} in transformers, {fmt.name} in the plan", num_bytes)

    def _check_pending(self, parts: tuple[LayerKind, ...]) -> None:
        waiting = sum(tensor.num_bytes for tensor in self._layer.of_role("pending"))
        if waiting and any(isinstance(part, CompressedSparse) for part in parts):
            self._note("tokens that wait to be compressed, and the overlap with the group before", waiting)
        elif waiting:
            self._unexplained(f"{waiting:,} B of buffers", waiting)


def _is_one_vector(part: LayerKind) -> bool:
    """Whether one vector is key and value at once: no value beside it."""
    return isinstance(part, CompressedSparse) or getattr(part, "v_width", None) == 0
