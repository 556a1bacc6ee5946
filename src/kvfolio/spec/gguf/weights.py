"""Counts the weights of a GGUF model from its tensor tables: numbers, bytes as stored, and those of routed experts.

Knows nothing of layers. Of a model in several files it reads the table of each part that lies beside the first.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from kvfolio.errors import BrokenModelError
from kvfolio.spec.fields import Fields
from kvfolio.spec.gguf.header import GgufHeader, GgufTensor, part_names, read_part
from kvfolio.spec.model import WeightCount

# The experts of a layer are one tensor; the first Mixtral files have one for each. Shared ones (_shexp) are no match.
_EXPERTS = re.compile(r"\.ffn_\w+_exps\.|\.ffn_(gate|up|down)\.\d+\.")


def first_part(header: GgufHeader) -> GgufHeader:
    """The part that holds the metadata: ``header`` itself, or the first of the parts that it is one of.

    Raises BrokenModelError with the name of the first part where that is missing.
    """
    if "general.architecture" in header.metadata:
        return header
    names = part_names(header.path)
    number = header.metadata.get("split.no")
    if not names and isinstance(number, int) and number > 0:
        raise BrokenModelError(
            f"{header.path} is part {number + 1} of a model under another name; the metadata is in the first part, "
            "so give that one, or give all parts their names back"
        )
    if not names or names[0] == header.path.name:
        return header
    first = header.path.parent / names[0]
    if not first.is_file():
        raise BrokenModelError(
            f"{header.path} is one part of {len(names)}, and {names[0]}, which holds the metadata, is missing; "
            "download it to the same folder"
        )
    return read_part(first)


def count_weights(parts: Sequence[GgufHeader], fields: Fields) -> WeightCount:
    """The weights of a model whose ``parts`` are at hand; what cannot be counted is noted in ``fields``."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    if not tensors:
        fields.note("the file lists no tensors: weights are counted as 0")
    experts = [tensor for tensor in tensors if _EXPERTS.search(tensor.name)]
    num_params, expert_params = _numbers(tensors), _numbers(experts)
    count = fields.integer("expert_count", default=0, low=0)
    used = fields.integer("expert_used_count", default=0, low=0)
    if used > count:
        raise BrokenModelError(
            f"{fields.where}: {fields.prefix}expert_used_count {used:,} is more than expert_count {count:,}; "
            "convert the model again"
        )
    if experts and not used:
        fields.note(f"{fields.prefix}expert_used_count is absent: every expert counted as active")
    num_bytes, expert_bytes = 0, 0
    for part in parts:
        for tensor, stored in _stored_bytes(part, fields):
            num_bytes += stored
            expert_bytes += stored if _EXPERTS.search(tensor.name) else 0
    active = expert_params * used // count if used else expert_params
    return WeightCount(
        num_params=num_params,
        num_active_params=num_params - expert_params + active,
        num_bytes=num_bytes,
        source="gguf",
        expert_params=expert_params,
        num_experts=count,
        experts_per_token=used,
        expert_bytes=expert_bytes,
    )


def stored_format(parts: Sequence[GgufHeader], fields: Fields) -> str:
    """The format of the matrices; norms and biases stay F32 in every file. Packed ones count as bf16, noted."""
    types = {tensor.type_name for part in parts for tensor in part.tensors if len(tensor.shape) > 1}
    for words, name in (({"F32"}, "f32"), ({"F32", "F16"}, "f16"), ({"F32", "BF16"}, "bf16")):
        if types and types <= words:
            return name
    if types:
        fields.note(f"weights are stored as {', '.join(sorted(types))}: computed in bf16")
    return "bf16"


def parts_at_hand(header: GgufHeader, fields: Fields) -> tuple[GgufHeader, ...]:
    """``header``, the first part, and the others that lie beside it; a missing one is noted by name."""
    names = part_names(header.path)
    count = header.metadata.get("split.count", 0)
    if not names and isinstance(count, int) and count > 1:
        fields.note(f"{header.path.name} is one of {count} parts under another name: only its own weights are counted")
    parts, missing = [header], []
    for name in names:
        path = header.path.parent / name
        if name == header.path.name:
            continue
        if path.is_file():
            parts.append(read_part(path))
        else:
            missing.append(name)
    if missing:
        fields.note(f"{missing[0]} is missing ({len(missing)} of {len(names)} parts): its weights are not counted")
    return tuple(parts)


def _numbers(tensors: Iterable[GgufTensor]) -> int:
    return sum(tensor.num_values for tensor in tensors)


def _stored_bytes(header: GgufHeader, fields: Fields) -> Iterator[tuple[GgufTensor, int]]:
    """Every tensor of one file with its bytes; of a type that is not known, what lies before the next tensor."""
    in_order = sorted(header.tensors, key=lambda tensor: tensor.offset)
    ends = [tensor.offset for tensor in in_order[1:]] + [header.file_bytes - header.data_offset]
    for tensor, end in zip(in_order, ends, strict=False):
        num_bytes = tensor.num_bytes
        if num_bytes is None:
            fields.note(
                f"tensor type {tensor.type_id} is not known here: its bytes are counted up to the next tensor, "
                f"at most {header.alignment - 1} too many for each"
            )
            num_bytes = max(0, end - tensor.offset)
        yield tensor, num_bytes
