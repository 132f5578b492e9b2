"""Reading and making traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake_py.errors import UsageError
from mooncake_py.ops.trace import Request, generate_trace, read_trace

GOOD = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 7]}


def write(path: Path, *lines: object) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def test_a_trace_is_read_in_order_and_up_to_the_limit(tmp_path: Path) -> None:
    later = GOOD | {"timestamp": 6, "hash_ids": []}
    path = write(tmp_path / "t.jsonl", GOOD, "", later, "not reached")
    assert read_trace(path, 2) == [Request(5, 700, 3, (0, 7)), Request(6, 700, 3, ())]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        (GOOD | {"timestamp": -1}, "'timestamp'"),
        (GOOD | {"input_length": 1.5}, "'input_length'"),
        (GOOD | {"output_length": True}, "'output_length'"),
        (GOOD | {"hash_ids": "12"}, "'hash_ids'"),
        (GOOD | {"hash_ids": [1, None]}, "'hash_ids'"),
        (GOOD | {"hash_ids": [1 << 63]}, "'hash_ids'"),
        ({"timestamp": 1}, "'input_length'"),
        ('{"timestamp": "\\ud800"}', "'timestamp'"),
    ],
)
def test_a_malformed_line_is_refused_with_file_and_line(
    tmp_path: Path, line: object, complaint: str
) -> None:
    path = write(tmp_path / "bad.jsonl", GOOD, line)
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert complaint in str(caught.value)
    assert caught.value.advice


def test_bytes_that_are_no_text_are_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\xff\xfe\x00{}\n")
    with pytest.raises(UsageError, match=r"bad\.jsonl:1: not JSON"):
        read_trace(path)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(UsageError, match="no request"):
        read_trace(write(tmp_path / "empty.jsonl", ""))


def test_a_made_trace_is_the_same_every_time_and_shares_prefixes() -> None:
    trace = generate_trace(200, seed=3)
    assert trace == generate_trace(200, seed=3)
    assert trace != generate_trace(200, seed=4)
    pages = [page for request in trace for page in request.hash_ids]
    assert len(trace) == 200
    assert len(set(pages)) < len(pages) / 2


def test_ids_of_a_made_trace_form_chains() -> None:
    before: dict[int, tuple[int, ...]] = {}
    for request in generate_trace(300, seed=5):
        for depth, page in enumerate(request.hash_ids):
            assert before.setdefault(page, request.hash_ids[:depth]) == request.hash_ids[:depth]
