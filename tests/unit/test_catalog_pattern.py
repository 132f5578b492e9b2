"""Patterns agree with Python's `re` in what they find, and never take longer than they may."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from mooncake_py.errors import UsageError
from mooncake_py.master.pattern import Pattern

_atoms = st.sampled_from(
    ["a", "b", "1", "-", ".", "[ab]", "[^a]", "[a-c1]", r"\d", r"\w", r"\D", r"\.", "[]a]", "[a-]"]
)
_repeats = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,}", "{0,2}", "{1,3}"])
_bodies = st.recursive(
    st.builds("".join, st.lists(st.builds(lambda a, r: a + r, _atoms, _repeats), max_size=4)),
    lambda inner: st.builds(
        lambda parts, repeat: "(" + "|".join(parts) + ")" + repeat,
        st.lists(inner, min_size=1, max_size=3),
        _repeats,
    ),
    max_leaves=5,
)
_patterns = st.builds(
    lambda begin, body, end: begin + body + end,
    st.sampled_from(["", "^"]), _bodies, st.sampled_from(["", "$"]),
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(text=_patterns, keys=st.lists(st.text("abc1-.]", max_size=8), min_size=1, max_size=8))
def test_f19_a_pattern_finds_what_re_finds(text: str, keys: list[str]) -> None:
    theirs = re.compile(re.sub(r"\$$", r"\\Z", text).encode(), re.DOTALL)
    if "|" in text and not text.startswith("("):
        return  # `^a|b` anchors only one of the two there
    try:
        ours = Pattern(text.encode())
    except UsageError as error:
        if "256 states" not in str(error):
            raise
        reject()  # larger than it may be
    for key in keys:
        raw = key.encode()
        wanted = theirs.match(raw) if text.startswith("^") else theirs.search(raw)
        assert ours.found_in(raw) == bool(wanted), (text, key)


@pytest.mark.parametrize(
    "text", [b"^(a+)+$", b"^(a|a)*$", b"(a*)*b", b"(.*a){12}", b"a?" * 30 + b"a" * 30]
)
def test_f19_patterns_that_ruin_others_cost_a_bounded_number_of_steps(text: bytes) -> None:
    pattern = Pattern(text)
    key = b"a" * 4000 + b"!"
    pattern.found_in(key)
    assert pattern.spent <= (len(key) + 1) * 257


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"(", "parenthesis"), (b"a)", "parenthesis"), (b"[a", "early"), (b"*a", "means nothing"),
        (b"a**", "repeats a repetition"), (b"a{3,1}", "cannot be"), (b"a{x}", "number"),
        (b"(a)\\1", "unknown escape"), (b"(?=a)", "means nothing"), (b"a\\", "early"),
        (b"(a{100}){100}", "states"), (b"[z-a]", "range"), (b"a" * 257, "longer"),
        (b"(" * 30 + b")" * 30, "in each other"), (b"a^b", "means nothing"),
        (b"a{", "number"), (b"((){9999}){9999}", "written out"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(text: bytes, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Pattern(text)


@settings(max_examples=300, deadline=None)
@given(text=st.binary(max_size=40), key=st.binary(max_size=20))
def test_no_bytes_from_a_stranger_are_a_defect(text: bytes, key: bytes) -> None:
    with suppress(UsageError):
        Pattern(text).found_in(key)
