"""The C++ extension, as native.py sees it."""

class Geometry:
    def __init__(self, numbers: list[int]) -> None: ...

class AttentionPlan:
    num_rows: int
    num_scratch: int
    max_slots: int
    def describe(self) -> dict[str, object]: ...

def instruction_sets() -> list[str]: ...
def has_quick_bf16() -> bool: ...
def make_plan(
    block_tokens: int,
    run_blocks: int,
    window: int,
    lossless: bool,
    slot_floats: int,
    sequences: list[tuple[int, int, int, int, int, int, int, int]],
    sealed: list[int],
    sinks: list[int],
) -> AttentionPlan: ...

class Kernels:
    name: str
    def __init__(self, name: str, num_threads: int) -> None: ...
    def attend(
        self,
        plan: AttentionPlan,
        geometry: Geometry,
        bases: list[int],
        strides: list[int],
        qkv: list[int],
        row_strides: list[int],
        out: int,
        partials: int,
        scale: float,
        sink_logits: int,
    ) -> None: ...
    def linear(
        self,
        x: int,
        weight: int,
        bias: int,
        y: int,
        x_f32: int,
        num_rows: int,
        in_width: int,
        out_width: int,
        format: int,
    ) -> None: ...
    def head_linear(self, x: int, weight: int, y: int, x_f32: int, shape: list[int], format: int) -> None: ...
    def rms_norm(
        self,
        x: int,
        row_stride: int,
        residual: int,
        sum: int,
        weight: int,
        y: int,
        shape: list[int],
        eps: float,
        format: int,
    ) -> None: ...
    def rope(self, x: int, row_stride: int, cos: int, sin: int, shape: list[int], half: int, format: int) -> None: ...
    def gated(self, gate_up: int, y: int, num_rows: int, width: int, activation: int, format: int) -> None: ...
    def read_bandwidth(self, data: int, num_bytes: int) -> float: ...
