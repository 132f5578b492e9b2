"""Patterns of keys that cost what they are long, whoever wrote them.

A backtracking matcher (Python's `re`) can take hours for one key of 40 bytes, and would hold the
catalog's only thread for as long. Here a pattern becomes an automaton whose states are all followed
at once, so a key costs at most its length times the number of states; sets of states that were met
before are remembered, so it usually costs its length. `spent` counts these steps for the caller,
who stops when it has had enough.

Syntax, over bytes: literals, `.` (any byte), classes `[a-z]` and `[^a-z]`, `\\d \\w \\s` and their
complements, groups `( )`, `|`, `* + ? {m} {m,} {m,n}`, `^` at the very beginning and `$` at the
very end, which anchor the whole of it. Else a pattern is found anywhere in the key. There are no
references back and no look-arounds. Limits: `PATTERN_MAX_BYTES`, and `_STATES_MAX` states and
`_BUILT_MAX` parts after all repetitions. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncake_py.errors import UsageError

PATTERN_MAX_BYTES = 256
_STATES_MAX = 256
_BUILT_MAX = 4096
_DEPTH_MAX = 16
_REMEMBERED_MAX = 10_000
_ALL = (1 << 256) - 1
_SPECIAL = b"()[]{}|*+?.^$\\"


def _mask(members: bytes) -> int:
    return sum(1 << each for each in set(members))


_DIGITS = b"0123456789"
_WORDS = _DIGITS + b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_"
_CLASSES = {
    ord("d"): _mask(_DIGITS),
    ord("w"): _mask(_WORDS),
    ord("s"): _mask(b" \t\n\r\f\v"),
}
_CLASSES |= {letter - 32: _ALL & ~mask for letter, mask in _CLASSES.items()}


@dataclass(frozen=True, slots=True)
class _One:
    """One byte out of a set (a bit a byte)."""

    mask: int


@dataclass(frozen=True, slots=True)
class _Row:
    items: list[_Node]


@dataclass(frozen=True, slots=True)
class _Choice:
    items: list[_Node]


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: _Node
    least: int
    most: int | None  # None: any number


_Node = _One | _Row | _Choice | _Repeat


class _Parser:
    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> _Node:
        node = self._choice(0)
        if self._at < len(self._text):
            raise self._fault("has a closing parenthesis too many")
        return node

    def _fault(self, what: str) -> UsageError:
        return UsageError(f"the pattern {what} (at byte {self._at})")

    def _peek(self) -> int:
        return self._text[self._at] if self._at < len(self._text) else -1

    def _next(self) -> int:
        if self._at == len(self._text):
            raise self._fault("ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, byte: bytes) -> bool:
        found = self._peek() == byte[0]
        self._at += found
        return found

    def _choice(self, depth: int) -> _Node:
        if depth > _DEPTH_MAX:
            raise self._fault(f"has more than {_DEPTH_MAX} groups in each other")
        items = [self._row(depth)]
        while self._take(b"|"):
            items.append(self._row(depth))
        return items[0] if len(items) == 1 else _Choice(items)

    def _row(self, depth: int) -> _Node:
        items: list[_Node] = []
        while self._peek() not in (-1, ord("|"), ord(")")):
            items.append(self._repeated(self._atom(depth)))
        return _Row(items)

    def _atom(self, depth: int) -> _Node:
        byte = self._next()
        if byte == ord("("):
            node = self._choice(depth + 1)
            if not self._take(b")"):
                raise self._fault("does not close a parenthesis")
            return node
        if byte == ord("."):
            return _One(_ALL)
        if byte == ord("["):
            return _One(self._class())
        if byte == ord("\\"):
            return _One(self._escaped())
        if byte in _SPECIAL:
            raise self._fault(f"has {chr(byte)!r} where it means nothing")
        return _One(1 << byte)

    def _escaped(self) -> int:
        byte = self._next()
        if byte in _CLASSES:
            return _CLASSES[byte]
        if byte in _WORDS:
            raise self._fault(f"has the unknown escape \\{chr(byte)}")
        return 1 << byte

    def _class(self) -> int:
        inverted = self._take(b"^")
        mask, first = 0, True
        while first or self._peek() != ord("]"):
            first = False
            low = self._next()
            if low == ord("\\"):
                mask |= self._escaped()
                continue
            high = low
            if self._text[self._at : self._at + 1] == b"-" and self._text[
                self._at + 1 : self._at + 2
            ] not in (b"]", b""):
                self._at += 1
                high = self._next()
            if high < low or high == ord("\\"):
                raise self._fault("has a range that ends before it begins")
            mask |= (1 << high + 1) - (1 << low)
        self._at += 1
        return _ALL & ~mask if inverted else mask

    def _repeated(self, node: _Node) -> _Node:
        if self._take(b"*"):
            node = _Repeat(node, 0, None)
        elif self._take(b"+"):
            node = _Repeat(node, 1, None)
        elif self._take(b"?"):
            node = _Repeat(node, 0, 1)
        elif self._take(b"{"):
            least = self._number()
            most: int | None = least
            if self._take(b","):
                most = None if self._peek() == ord("}") else self._number()
            if not self._take(b"}") or (most is not None and most < least):
                raise self._fault("has a repetition that cannot be")
            node = _Repeat(node, least, most)
        if self._peek() >= 0 and bytes([self._peek()]) in (b"*", b"+", b"?", b"{"):
            raise self._fault("repeats a repetition")
        return node

    def _number(self) -> int:
        start = self._at
        while ord("0") <= self._peek() <= ord("9") and self._at - start < 4:
            self._at += 1
        if start == self._at:
            raise self._fault("has a repetition without a number")
        return int(self._text[start : self._at])


_END = 0  # the state in which the pattern has been found


@dataclass(slots=True)
class _Automaton:
    """State s goes on to `target[s]` with a byte of `masks[s]`, and to all of `empties[s]` without
    one."""

    masks: list[int] = field(default_factory=lambda: [0])
    targets: list[int] = field(default_factory=lambda: [_END])
    empties: list[list[int]] = field(default_factory=lambda: [[]])
    built: int = 0

    def state(self, mask: int, target: int, empties: list[int]) -> int:
        if len(self.masks) == _STATES_MAX:
            raise UsageError(f"the pattern has more than {_STATES_MAX} states")
        self.masks.append(mask)
        self.targets.append(target)
        self.empties.append(empties)
        return len(self.masks) - 1

    def build(self, node: _Node, follow: int) -> int:
        """The state that begins this node, after which `follow` comes. Repetitions of nothing make
        no states, so what is built is counted as well."""
        self.built += 1
        if self.built > _BUILT_MAX:
            raise UsageError(f"the pattern has more than {_BUILT_MAX} parts when it is written out")
        match node:
            case _One(mask):
                return self.state(mask, follow, [])
            case _Row(items):
                for item in reversed(items):
                    follow = self.build(item, follow)
                return follow
            case _Choice(items):
                return self.state(0, _END, [self.build(item, follow) for item in items])
            case _Repeat(item, least, most):
                if most is None:
                    loop = self.state(0, _END, [follow])
                    self.empties[loop].append(self.build(item, loop))
                    follow = loop
                else:
                    last = follow
                    for _ in range(most - least):
                        follow = self.state(0, _END, [last, self.build(item, follow)])
                for _ in range(least):
                    follow = self.build(item, follow)
                return follow

    def closure(self, states: set[int]) -> frozenset[int]:
        found, todo = set(states), list(states)
        while todo:
            for each in self.empties[todo.pop()]:
                if each not in found:
                    found.add(each)
                    todo.append(each)
        return frozenset(found)


class Pattern:
    """A pattern made ready. Raises UsageError naming what it does not understand."""

    def __init__(self, text: bytes) -> None:
        if len(text) > PATTERN_MAX_BYTES:
            raise UsageError(f"the pattern is longer than {PATTERN_MAX_BYTES} bytes")
        self._floating = not text.startswith(b"^")
        text = text.removeprefix(b"^")
        slashes = len(text[:-1]) - len(text[:-1].rstrip(b"\\"))
        self._to_end = text.endswith(b"$") and slashes % 2 == 0
        if self._to_end:
            text = text[:-1]
        self._automaton = _Automaton()
        start = self._automaton.build(_Parser(text).parse(), _END)
        self._start = self._automaton.closure({start})
        self._known: dict[tuple[frozenset[int], int], frozenset[int]] = {}
        self.spent = 0  # steps so far

    def found_in(self, key: bytes) -> bool:
        states, known = self._start, self._known
        self.spent += len(key) + 1
        if _END in states and not self._to_end:
            return True
        for byte in key:
            after = known.get((states, byte))
            if after is None:
                after = self._step(states, byte)
            states = after
            if _END in states and not self._to_end:
                return True
            if not states:
                return False
        return _END in states

    def _step(self, states: frozenset[int], byte: int) -> frozenset[int]:
        automaton = self._automaton
        self.spent += len(automaton.masks)
        reached = {automaton.targets[each] for each in states if automaton.masks[each] >> byte & 1}
        after = automaton.closure(reached)
        if self._floating:
            after |= self._start
        if len(self._known) >= _REMEMBERED_MAX:
            self._known.clear()
        self._known[states, byte] = after
        return after
