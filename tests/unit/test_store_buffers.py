"""What counts as bytes, and where they lie."""

from __future__ import annotations

import array
import mmap

import numpy as np
import pytest

from mooncake_py.errors import UsageError
from mooncake_py.store.buffers import fresh_bytes, source_span, target_span, view_of


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


def test_f03_fresh_bytes_are_filled_before_anybody_sees_them() -> None:
    value, span = fresh_bytes(5)
    view_of(span)[:] = b"12345"
    assert value == b"12345"
    with pytest.raises(UsageError):
        fresh_bytes(1)


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
