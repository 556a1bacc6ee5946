"""The C++ kernels behind the reference's interface: checks dtypes and shapes at the door, then passes addresses.

Knows nothing of pools beyond the rows it is handed. CPU tensors only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfolio.errors import OptionError
from kvfolio.kernels import _native
from kvfolio.kernels.codec import TORCH_DTYPES
from kvfolio.kernels.reference import ReferenceOps
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory
from kvfolio.spec.formats import Format

# Numbers of csrc/shapes.hpp.
_CODES = {"f32": 0, "bf16": 1, "f16": 2, "int8": 3, "fp8": 4, "fp8-scaled": 4, "fp8-e5m2": 5}
_PACKED = 10  # + bits
_NO_SCALES, _VECTOR_F32, _VECTOR_BF16, _CHANNEL = range(4)
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}

# Up to so many rows our own product is the quicker one: benchmarks/linear.py, docs/lab.md. Where bf16 is quick in torch
# (AMX, AMD's AVX512-BF16) the border was not measured; 32 is a cautious guess.
FEW_ROWS = 32 if _native.has_quick_bf16() else 96

# Weights converted to f32 at a time: a piece that stays in the caches.
_PIECE_VALUES = 1 << 21


def instruction_sets() -> list[str]:
    """Instruction sets this machine can run, best first."""
    return _native.instruction_sets()


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One step's attention plan for one layer group, with the scratch memory its layers share."""

    geometry: LayerGeometry
    attention: _native.AttentionPlan
    cpp_geometry: _native.Geometry
    scratch: Tensor  # uint8 [num_scratch, exact layer bytes]: exact blocks that this step seals
    partials: Tensor  # f32 [max_slots, num_q_heads, v_width + 2]


class NativeOps:
    """The arithmetic of a network on CPU threads.

    ``linear``: a row's result never depends on the number of rows while our own product computes it: up to FEW_ROWS
    rows, with ``deterministic`` any number. Without it, more rows go to torch, which adds up in another order.
    """

    def __init__(self, num_threads: int, deterministic: bool = False, instruction_set: str | None = None) -> None:
        known = instruction_sets()
        if instruction_set is not None and instruction_set not in known:
            raise OptionError(
                f"instruction set {instruction_set!r} is not available here; available: {', '.join(known)}"
            )
        self._kernels = _native.Kernels(instruction_set or known[0], num_threads)
        self._num_threads = num_threads
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._reference = ReferenceOps(deterministic)
        self.deterministic = deterministic
        self.name = f"native-{self._kernels.name}"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        num_rows, width = x.shape
        if num_rows > FEW_ROWS and not self.deterministic:
            return _many_rows(x, weight, bias)
        code = _code(x)
        if weight.dtype != x.dtype or weight.shape[1] != width or not weight.is_contiguous():
            raise OptionError(
                f"linear: x {tuple(x.shape)} {x.dtype} does not meet weight {tuple(weight.shape)} {weight.dtype}"
            )
        if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1] or not bias.is_contiguous()):
            raise OptionError(
                f"linear: bias {tuple(bias.shape)} {bias.dtype} does not meet weight {tuple(weight.shape)}"
            )
        x = x.contiguous()
        num_out = weight.shape[0]
        y = x.new_empty((num_rows, num_out))
        scratch = self._scratch_for((num_rows + 4 * self._num_threads) * (width + 31))
        self._kernels.linear(
            x.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            scratch.data_ptr(),
            num_rows,
            width,
            num_out,
            code,
        )
        return y

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        num_rows, num_heads, width = x.shape
        if weight.dtype != x.dtype or weight.shape[::2] != (num_heads, width) or not weight.is_contiguous():
            raise OptionError(
                f"head_linear: x {tuple(x.shape)} {x.dtype} does not meet weight {tuple(weight.shape)} {weight.dtype}"
            )
        heads = x.transpose(0, 1).contiguous()  # [num_heads, num_rows, width]
        if num_rows > FEW_ROWS and not self.deterministic:
            y = torch.stack([_many_rows(*pair, None) for pair in zip(heads, weight, strict=True)])
            return y.transpose(0, 1)
        num_out = weight.shape[1]
        y = x.new_empty((num_heads, num_rows, num_out))
        scratch = self._scratch_for(self._num_threads * num_rows * (width + 31))
        self._kernels.head_linear(
            heads.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            scratch.data_ptr(),
            [num_heads, num_rows, width, num_out],
            _code(x),
        )
        return y.transpose(0, 1)

    def _scratch_for(self, num_floats: int) -> Tensor:
        """f32 scratch of at least ``num_floats``, kept from call to call."""
        if self._scratch.numel() < num_floats:
            self._scratch = torch.empty(num_floats, dtype=torch.float32)
        return self._scratch

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = x.new_empty(x.shape)
        self._norm(x, 0, 0, weight, y, eps)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise OptionError(f"add_rms_norm: {tuple(x.shape)} {x.dtype} + {tuple(residual.shape)} {residual.dtype}")
        y, total, residual = x.new_empty(x.shape), x.new_empty(x.shape), residual.contiguous()
        self._norm(x, residual.data_ptr(), total.data_ptr(), weight, y, eps)
        return y, total

    def _norm(self, x: Tensor, residual: int, total: int, weight: Tensor, y: Tensor, eps: float) -> None:
        num_rows, *heads, width = x.shape
        if weight.dtype != torch.float32 or weight.numel() != width or not weight.is_contiguous():
            raise OptionError(f"rms_norm: weight {tuple(weight.shape)} {weight.dtype}; expected dense f32 [{width}]")
        self._kernels.rms_norm(
            _address(x),
            x.stride(0),
            residual,
            total,
            weight.data_ptr(),
            y.data_ptr(),
            [num_rows, heads[0] if heads else 1, width],
            eps,
            _code(x),
        )

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return self._reference.layer_norm(x, weight, bias, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if cos.dtype != torch.float32 or cos.shape[0] != x.shape[0] or 2 * cos.shape[1] > x.shape[2]:
            raise OptionError(f"rope: cos {tuple(cos.shape)} {cos.dtype} does not meet x {tuple(x.shape)}")
        if sin.dtype != cos.dtype or sin.shape != cos.shape or not (sin.is_contiguous() and cos.is_contiguous()):
            raise OptionError(f"rope: sin {tuple(sin.shape)} {sin.dtype} does not meet cos; both must be dense")
        self._kernels.rope(
            _address(x), x.stride(0), cos.data_ptr(), sin.data_ptr(), list(x.shape), cos.shape[1], _code(x)
        )
        return x

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation not in _ACTIVATION_CODES:
            return self._reference.gated(gate_up, activation)
        gate_up = gate_up.contiguous()
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = gate_up.new_empty((num_rows, width))
        self._kernels.gated(
            gate_up.data_ptr(), y.data_ptr(), num_rows, width, _ACTIVATION_CODES[activation], _code(gate_up)
        )
        return y

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return self._reference.activate(x, activation)

    def plan(self, geometry: LayerGeometry, chunks: tuple[ChunkBlocks, ...]) -> NativePlan:
        """The plan of one step for the layers of one group: made once, used by each of them."""
        sealed: list[int] = []
        sinks: list[int] = []
        sequences: list[tuple[int, int, int, int, int, int, int, int]] = []
        for chunk in chunks:
            begin, sinks_begin = len(sealed), len(sinks)
            sealed.extend(chunk.sealed)
            sinks.extend(chunk.sinks)
            places = (begin, len(sealed), sinks_begin, len(sinks), chunk.open_slot)
            sequences.append((chunk.start, chunk.num_tokens, chunk.first_block, *places))
        slot_floats = geometry.num_q_heads * (geometry.v_width + 2)
        attention = _native.make_plan(
            geometry.block_tokens,
            geometry.run_blocks,
            geometry.window or 0,
            geometry.is_lossless,
            slot_floats,
            sequences,
            sealed,
            sinks,
        )
        cpp_geometry = _native.Geometry(
            [
                geometry.num_q_heads,
                geometry.num_kv_heads,
                geometry.k_width,
                geometry.v_width,
                geometry.block_tokens,
                int(geometry.v_is_prefix_of_k),
                *_format_numbers(geometry.stored.k),
                *_format_numbers(geometry.stored.v),
                *_format_numbers(geometry.exact.k),
            ]
        )
        scratch = torch.empty((attention.num_scratch, geometry.layer_bytes(geometry.exact)), dtype=torch.uint8)
        partials = torch.empty(attention.max_slots * slot_floats, dtype=torch.float32)
        return NativePlan(geometry, attention, cpp_geometry, scratch, partials)

    def attend(
        self,
        plan: NativePlan,
        memory: LayerMemory,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """See models.parts.KVView.attend. Writes and seals first, then reads (law 1)."""
        geometry = plan.geometry
        dtype = TORCH_DTYPES[geometry.exact.k.name]
        for name, tensor, heads, width in (
            ("q", q, geometry.num_q_heads, geometry.k_width),
            ("k", k, geometry.num_kv_heads, geometry.k_width),
            ("v", v, geometry.num_kv_heads, geometry.v_width),
        ):
            if tensor.shape != (plan.attention.num_rows, heads, width) or tensor.dtype != dtype:
                raise OptionError(
                    f"attend: {name} is {tuple(tensor.shape)} {tensor.dtype}; "
                    f"expected {(plan.attention.num_rows, heads, width)} {dtype}"
                )
        if sink_logits is not None and (
            sink_logits.shape != (geometry.num_q_heads,)
            or sink_logits.dtype != torch.float32
            or not sink_logits.is_contiguous()
        ):
            raise OptionError(
                f"attend: sink_logits is {tuple(sink_logits.shape)} {sink_logits.dtype}; "
                f"expected dense f32 [{geometry.num_q_heads}]"
            )
        out = q.new_empty((q.shape[0], geometry.num_q_heads, geometry.v_width))
        self._kernels.attend(
            plan.attention,
            plan.cpp_geometry,
            [
                memory.sealed.data_ptr() + memory.sealed_offset,
                memory.open.data_ptr() + memory.open_offset,
                plan.scratch.data_ptr(),
                0 if memory.sinks is None else memory.sinks.data_ptr() + memory.sinks_offset,
            ],
            [
                memory.sealed.stride(0),
                memory.open.stride(0),
                plan.scratch.stride(0),
                0 if memory.sinks is None else memory.sinks.stride(0),
            ],
            [_address(q), _address(k), _address(v)],
            [q.stride(0), k.stride(0), v.stride(0)],
            out.data_ptr(),
            plan.partials.data_ptr(),
            scale,
            0 if sink_logits is None else sink_logits.data_ptr(),
        )
        return out


def _format_numbers(fmt: Format) -> tuple[int, int, int]:
    """(code, scales, whether it is rotated), as csrc/shapes.hpp has them."""
    if fmt.scale_tokens:
        scales = _CHANNEL
    else:
        scales = {0: _NO_SCALES, 4: _VECTOR_F32, 2: _VECTOR_BF16}[fmt.scale_bytes]
    return _PACKED + fmt.bits if fmt.is_packed else _CODES[fmt.name], scales, int(fmt.is_rotated)


def _many_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's product; where bf16 is slow, in f32, piece by piece: benchmarks/linear.py, docs/lab.md."""
    if x.dtype != torch.bfloat16 or _native.has_quick_bf16():
        return functional.linear(x, weight, bias)
    num_out, width = weight.shape
    x_f32 = x.to(torch.float32)
    y = x.new_empty((x.shape[0], num_out))
    step = max(1, _PIECE_VALUES // width)
    for begin in range(0, num_out, step):
        piece = slice(begin, begin + step)
        bias_f32 = None if bias is None else bias[piece].to(torch.float32)
        y[:, piece] = functional.linear(x_f32, weight[piece].to(torch.float32), bias_f32)
    return y


def measure_read_bandwidth(data: Tensor) -> float:
    """Bytes a second of one pass of all threads over ``data``."""
    return _native.Kernels(instruction_sets()[0], torch.get_num_threads()).read_bandwidth(data.data_ptr(), data.nbytes)


def _code(x: Tensor) -> int:
    code = _DTYPE_CODES.get(x.dtype)
    if code is None or not x.is_cpu:
        raise OptionError(f"the native kernels compute f32, bf16 and f16 on the CPU, not {x.dtype} on {x.device}")
    return code


def _address(x: Tensor) -> int:
    """Address of a [rows, heads, width] or [rows, width] tensor whose rows may be strided but are dense inside."""
    if x.is_contiguous():
        return x.data_ptr()
    inner = 1
    for axis in range(x.dim() - 1, 0, -1):
        if x.shape[axis] != 1 and x.stride(axis) != inner:
            raise OptionError(f"a row of {tuple(x.shape)} is not dense: strides {x.stride()}")
        inner *= x.shape[axis]
    return x.data_ptr()
