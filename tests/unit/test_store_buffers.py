"""What counts as bytes, and where they lie."""

from __future__ import annotations

import array
import mmap

import numpy as np
import pytest

from mooncake_py._native import ffi
from mooncake_py.errors import UsageError
from mooncake_py.store.buffers import (
    Span,
    source_pieces,
    source_span,
    target_pieces,
    target_span,
)
from mooncake_py.store.results import ResultPool
from mooncake_py.store.targets import NewTargets


def view_of(span: Span) -> ffi.buffer:
    return ffi.buffer(ffi.cast("char *", span.address), span.nbytes)


@pytest.mark.parametrize(
    "value",
    [b"abcd", bytearray(b"abcd"), memoryview(b"xabcdx")[1:5], array.array("B", b"abcd"),
     np.frombuffer(b"abcd", np.uint16), np.frombuffer(b"abcd", np.uint8).reshape(2, 2)],
)  # fmt: skip
def test_f03_every_contiguous_buffer_is_a_source(value: object) -> None:
    span = source_span(value)
    assert span.nbytes == 4
    assert bytes(view_of(span)) == b"abcd"


@pytest.mark.parametrize("value", [b"", bytearray(), np.zeros((0, 3)), memoryview(b"")])
def test_a05_empty_buffers_have_an_address(value: object) -> None:
    span = source_span(value)
    assert span.nbytes == 0
    assert span.address != 0


def test_f03_a_target_is_written_in_place() -> None:
    for target in (bytearray(3), np.zeros(3, np.uint8), mmap.mmap(-1, 3)):
        view_of(target_span(target))[:] = b"xyz"
        assert bytes(memoryview(target)[:3]) == b"xyz"


@pytest.mark.parametrize("target", [b"abc", memoryview(b"abc"), "abc", 3, np.zeros((4, 4)).T[1:]])
def test_a07_what_cannot_be_written_is_no_target(target: object) -> None:
    with pytest.raises(UsageError, match="Remedy"):
        target_span(target)


def test_a46_a_spans_owner_cannot_be_resized_meanwhile() -> None:
    value = bytearray(10)
    span = source_span(value)
    with pytest.raises(BufferError):
        value.extend(b"more")
    del span
    value.extend(b"more")


def test_f03_new_bytes_are_filled_before_anybody_sees_them() -> None:
    new = NewTargets(4, None, ResultPool())
    to = new.place(range(4), [5, 0, 1, 3])
    for pointer, text in zip(to.pointers, (b"12345", b"", b"6", b"789"), strict=True):
        ffi.buffer(pointer)[:] = text
    assert new.values() == [b"12345", b"", b"6", b"789"]
    assert all(type(value) is bytes for value in new.values())
    assert bytes(1) == b"\0"  # objects the interpreter shares were not written to


def test_f03_a_value_may_lie_in_several_buffers() -> None:
    pieces = source_pieces([b"ab", [b"cd", bytearray(b"e"), b""], (np.arange(3, dtype=np.uint8),)])
    assert pieces.totals() == [2, 3, 3]
    assert list(map(bytes, map(ffi.buffer, pieces.pointers, pieces.sizes))) == [
        b"ab", b"cd", b"e", b"", b"\0\1\2",
    ]  # fmt: skip
    some = pieces.select([2, 1])
    assert (some.totals(), some.ends) == ([3, 3], [1, 4])
    assert source_pieces([b"ab", [b"c"]]).ends is None
    with pytest.raises(UsageError):
        target_pieces([bytearray(2), [bytearray(1), b"read-only"]])


class Device:
    type = "cuda"

    def __str__(self) -> str:
        return "cuda:0"


class DeviceTensor:
    device = Device()

    def data_ptr(self) -> int:
        return 0xDEAD0000


def test_a10_a_device_pointer_is_never_taken_for_memory_of_this_process() -> None:
    for span in (source_span, target_span):
        with pytest.raises(UsageError, match="cuda:0"):
            span(DeviceTensor())
