"""The GGUF header reader on files written by hand: every value type, every way to be broken.

Knows nothing of architectures; the names in these files mean nothing to the reader.
"""

import struct
import time
from pathlib import Path

import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Items,
    Tensor,
    Typed,
    gguf,
    text,
    tiny_llama,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfolio.errors import BrokenModelError
from kvfolio.spec.gguf.header import GgufTensor, LazyArray, check_complete, read_f32, read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_every_scalar_type_is_read(file: Path) -> None:
    values = {
        "u8": Typed(U8, 255),
        "i8": Typed(I8, -128),
        "u16": Typed(U16, 65_535),
        "i16": Typed(I16, -32_768),
        "u32": Typed(U32, 2**32 - 1),
        "i32": Typed(I32, -(2**31)),
        "f32": Typed(F32, 0.5),
        "yes": Typed(BOOL, True),
        "no": Typed(BOOL, False),
        "word": Typed(STRING, "größer"),
        "u64": Typed(U64, 2**64 - 1),
        "i64": Typed(I64, -(2**63)),
        "f64": Typed(F64, 0.1),
    }
    file.write_bytes(gguf(values))
    assert read_header(file).metadata == {key: typed.value for key, typed in values.items()}


@pytest.mark.parametrize("version", [2, 3])
def test_versions_two_and_three_are_read_alike(file: Path, version: int) -> None:
    tensor = Tensor("w", (3, 4), type_id=0, data=b"\0" * 48)
    file.write_bytes(gguf({"a": 1}, (tensor, Tensor("v", (5,), 1, b"\0" * 10)), version))
    header = read_header(file)
    assert (header.version, header.alignment, header.path) == (version, 32, file)
    assert header.tensors == (GgufTensor("w", (3, 4), 0, 0), GgufTensor("v", (5,), 1, 64))
    assert header.data_offset % 32 == 0
    assert header.file_bytes == header.data_offset + 96 == file.stat().st_size


def test_arrays_stay_in_the_file_until_their_values_are_asked_for(file: Path) -> None:
    tokens = tuple(f"token {index}" for index in range(1000))
    file.write_bytes(gguf({"tokens": Items(STRING, tokens), "scores": Items(F32, (0.5, -1.0)), "after": 7}))
    metadata = read_header(file).metadata
    assert metadata["after"] == 7
    array, scores = metadata["tokens"], metadata["scores"]
    assert isinstance(array, LazyArray) and isinstance(scores, LazyArray)
    assert (len(array), array.values()) == (1000, tokens)
    assert scores.values() == (0.5, -1.0)


def test_arrays_of_arrays_and_of_flags_are_read(file: Path) -> None:
    inner = (Items(U16, (1, 2, 3)), Items(STRING, ("x",)), Items(U16, ()))
    file.write_bytes(gguf({"nested": Items(ARRAY, inner), "flags": Items(BOOL, (True, False)), "after": "end"}))
    metadata = read_header(file).metadata
    nested, flags = metadata["nested"], metadata["flags"]
    assert isinstance(nested, LazyArray) and isinstance(flags, LazyArray)
    assert [item.values() for item in nested.values() if isinstance(item, LazyArray)] == [(1, 2, 3), ("x",), ()]
    assert flags.values() == (True, False)
    assert metadata["after"] == "end"


def test_a_text_that_is_not_utf8_survives_byte_for_byte(file: Path) -> None:
    piece = b"\xff\x80a".decode("utf-8", "surrogateescape")
    file.write_bytes(gguf({"one": piece, "many": Items(STRING, (piece,))}))
    metadata = read_header(file).metadata
    many = metadata["many"]
    assert isinstance(many, LazyArray)
    assert metadata["one"] == piece == many.values()[0]


def test_an_unknown_tensor_type_does_not_stop_the_header(file: Path) -> None:
    file.write_bytes(gguf(tiny_llama(), (Tensor("w", (2, 32), 42), Tensor("v", (8,), 0, b"\0" * 32))))
    header = read_header(file)
    assert header.tensors[0] == GgufTensor("w", (2, 32), 42, 0)
    assert (header.tensors[0].type_name, header.tensors[0].num_bytes) == ("type 42", None)
    check_complete(header)


@pytest.mark.parametrize(("type_id", "num_bytes"), [(0, 1024), (1, 512), (30, 512), (3, 160), (8, 272), (12, 144)])
def test_a_tensor_of_256_numbers_takes_the_bytes_of_its_type(type_id: int, num_bytes: int) -> None:
    assert GgufTensor("w", (1, 256), type_id, 0).num_bytes == num_bytes


def test_an_alignment_of_the_files_own_moves_the_data(file: Path) -> None:
    file.write_bytes(gguf({"general.alignment": 128}, (Tensor("w", (1,), 0, b"\0" * 4),), alignment=128))
    header = read_header(file)
    assert (header.alignment, header.data_offset % 128) == (128, 0)
    check_complete(header)


@pytest.mark.parametrize("alignment", [0, 12, "32"])
def test_an_alignment_that_is_no_multiple_of_eight_is_refused(file: Path, alignment: object) -> None:
    file.write_bytes(gguf({"general.alignment": alignment}))
    with pytest.raises(BrokenModelError, match=r"general.alignment is .*; accepted: a positive multiple of 8"):
        read_header(file)


def test_a_header_cut_anywhere_is_refused_with_the_byte_where_it_ends(file: Path) -> None:
    metadata = tiny_llama() | {"nested": Items(ARRAY, (Items(U64, (1, 2)),)), "flag": True}
    whole = gguf(metadata, (Tensor("weights", (2, 3)), Tensor("more", (5,))))
    end = whole.index(b"more") + 4 + 4 + 8 + 4 + 8  # behind the last tensor's name: rank, one size, type, offset
    for size in range(4, end):
        file.write_bytes(whole[:size])
        with pytest.raises(BrokenModelError, match=f"is cut: it ends at byte {size:,}, inside ") as raised:
            read_header(file)
        assert str(file) in str(raised.value)
    file.write_bytes(whole[:end])
    assert len(read_header(file).tensors) == 2


def test_the_message_of_a_cut_header_names_what_was_being_read(file: Path) -> None:
    whole = gguf({"some.key": "a long text"}, (Tensor("weights", (2, 3)),))
    file.write_bytes(whole[: whole.index(b"a long") + 3])
    with pytest.raises(BrokenModelError, match=r"inside metadata 'some.key'; copy or download the file again"):
        read_header(file)
    file.write_bytes(whole[: whole.index(b"weights") + 9])
    with pytest.raises(BrokenModelError, match="inside tensor 1 of 1"):
        read_header(file)


@pytest.mark.parametrize("content", [b"", b"GG", b"version https://git-lfs", b"\x7fELF", b"ggjt\1\0\0\0"])
def test_a_file_that_does_not_start_as_gguf_is_refused_with_what_it_starts_with(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    shown = "ends at byte 0" if not content else repr(content[:4]).replace("\\", "\\\\")
    with pytest.raises(BrokenModelError, match=shown):
        read_header(file)


@pytest.mark.parametrize("version", [0, 1, 4])
def test_another_version_is_refused_by_its_number(file: Path, version: int) -> None:
    file.write_bytes(gguf({}, version=version))
    with pytest.raises(BrokenModelError, match=f"GGUF version {version}; accepted: 2 and 3"):
        read_header(file)


def test_a_big_endian_file_is_called_that(file: Path) -> None:
    file.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(BrokenModelError, match="big-endian; accepted: little-endian"):
        read_header(file)


@pytest.mark.parametrize("in_array", [False, True])
def test_an_unknown_value_type_is_refused_by_key_and_number(file: Path, in_array: bool) -> None:
    value = struct.pack("<IIQ", ARRAY, 13, 1) if in_array else struct.pack("<I", 13)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("odd.key") + value + b"\0" * 64)
    with pytest.raises(BrokenModelError, match=r"metadata 'odd.key' has value type 13; accepted: 0 to 12"):
        read_header(file)


def test_a_flag_that_is_neither_true_nor_false_is_refused(file: Path) -> None:
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("flag") + struct.pack("<IB", BOOL, 2) + b"\0" * 32)
    with pytest.raises(BrokenModelError, match="true-or-false value that holds 2"):
        read_header(file)


def test_arrays_nested_without_end_are_refused(file: Path) -> None:
    nest = struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("deep") + nest)
    with pytest.raises(BrokenModelError, match="nests arrays deeper than 8"):
        read_header(file)


def test_a_key_or_a_tensor_that_stands_there_twice_is_refused(file: Path) -> None:
    twice = entry_bytes("a") * 2
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + twice)
    with pytest.raises(BrokenModelError, match="'a' stands there twice"):
        read_header(file)
    file.write_bytes(gguf({}, (Tensor("w", (1,)), Tensor("w", (1,)))))
    with pytest.raises(BrokenModelError, match="two tensors have the same name"):
        read_header(file)


def entry_bytes(key: str) -> bytes:
    return text(key) + struct.pack("<II", U32, 1)


def test_a_missing_file_and_a_folder_are_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(BrokenModelError, match=r"absent\.gguf cannot be read: No such file"):
        read_header(tmp_path / "absent.gguf")
    with pytest.raises(BrokenModelError, match="cannot be read: Is a directory"):
        read_header(tmp_path)


def test_the_missing_part_of_a_split_model_is_named(tmp_path: Path) -> None:
    for number in (1, 3):
        (tmp_path / f"big-{number:05}-of-00003.gguf").write_bytes(gguf({}))
    with pytest.raises(BrokenModelError, match=r"big-00002-of-00003\.gguf is missing \(1 in all\)"):
        read_header(tmp_path / "big-00001-of-00003.gguf")


def test_a_split_model_with_all_its_parts_must_be_merged_first(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"big-{number:05}-of-00002.gguf").write_bytes(gguf({}))
    with pytest.raises(BrokenModelError, match=r"llama-gguf-split --merge big-00001-of-00002\.gguf big\.gguf"):
        read_header(tmp_path / "big-00002-of-00002.gguf")


def test_a_part_under_another_name_is_still_seen(file: Path) -> None:
    file.write_bytes(gguf({"split.no": Typed(U16, 0), "split.count": Typed(U16, 3)}))
    with pytest.raises(BrokenModelError, match=r"is part 1 of 3 under another name"):
        read_header(file)


def test_a_single_part_is_a_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "small-00001-of-00001.gguf"
    path.write_bytes(gguf({"split.count": Typed(U16, 1)}))
    assert read_header(path).metadata == {"split.count": 1}


def test_cut_tensor_data_is_refused_with_the_tensor_and_the_bytes_that_it_lacks(file: Path) -> None:
    tensors = (Tensor("first", (2, 32), 8, b"\1" * 68), Tensor("last", (8,), 0, b"\2" * 32))
    whole = gguf(tiny_llama(), tensors)  # first at 0…68, padding to 96, last at 96…128
    file.write_bytes(whole)
    check_complete(read_header(file))
    for cut, name, missing, of in ((1, "last", 1, 32), (32, "last", 32, 32), (96, "first", 36, 68)):
        file.write_bytes(whole[:-cut])
        with pytest.raises(BrokenModelError, match=f"tensor '{name}' lacks {missing} of its {of} bytes"):
            check_complete(read_header(file))


def test_the_values_of_a_small_f32_tensor_can_be_read_and_of_no_other(file: Path) -> None:
    floats = struct.pack("<3f", 1.0, 2.5, -4.0)
    file.write_bytes(gguf({}, (Tensor("half", (2,), 1, b"\0" * 4), Tensor("divisors", (3,), 0, floats))))
    header = read_header(file)
    assert read_f32(header, header.tensors[1]) == (1.0, 2.5, -4.0)
    with pytest.raises(BrokenModelError, match="tensor 'half' is F16; accepted here: F32"):
        read_f32(header, header.tensors[0])


def test_a_vocabulary_of_a_quarter_million_tokens_is_skipped_in_a_moment(file: Path) -> None:
    file.write_bytes(gguf({"tokens": Items(STRING, ("token",) * 262_144), "after": 1}))
    start = time.perf_counter()
    header = read_header(file)
    assert time.perf_counter() - start < 1.0  # 0.05 s on a quiet machine
    assert header.metadata["after"] == 1


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused_but_never_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(gguf(tiny_llama() | {"nested": Items(ARRAY, (Items(I32, (1,)),))}, (Tensor("w", (4, 4)),)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(4, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(whole)
    try:
        header = read_header(path)
        check_complete(header)
        for value in header.metadata.values():
            if isinstance(value, LazyArray):
                value.values()
    except BrokenModelError as error:
        assert str(path) in str(error)
