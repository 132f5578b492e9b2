"""Which token pages are cached in this process, and where: device (L1), host (L2), or both.

A tree a namespace. A node is a run of pages that always appeared together; its children begin with
different pages. Each page has a chain key: the hash of all tokens up to its end, which names the
same page in the store (L3). What the store holds is never mirrored here, always asked.

    every page of a node is in the same tiers          (a node is split where that would change)
    a node on the device has its parent on the device  (a prefix is usable from its beginning)
    a node is on the device or on the host, or both; one that is in neither is not in the tree

Locks. A request locks the path from its last node to the root: nothing of it leaves the device. A
copy that is going on locks the host pages of the path likewise. Both survive a split. Eviction
takes leaves only, so the tail of a prefix goes before its middle, and stops at what is locked.

Pure: no threads, clock, tensors or I/O. Pages are numbers of some pool. Not thread-safe.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_py.errors import UsageError
from mooncake_py.hicache.eviction import EvictionPolicy, LruEviction

Page = tuple[int, ...]  # its tokens


def split_pages(tokens: Sequence[int], page_tokens: int) -> list[Page]:
    """Whole pages only: what is left over at the end is not cached."""
    whole = len(tokens) - len(tokens) % page_tokens
    return [tuple(tokens[at : at + page_tokens]) for at in range(0, whole, page_tokens)]


def chain_key(before: bytes, page: Page) -> bytes:
    """SHA-256 of the key before (of the namespace for the first page) and the page's tokens as
    little-endian 64-bit numbers."""
    return hashlib.sha256(before + np.asarray(page, dtype="<i8").tobytes()).digest()


def chain_keys(namespace: str, pages: Sequence[Page]) -> list[bytes]:
    keys: list[bytes] = []
    key = hashlib.sha256(namespace.encode()).digest()
    for page in pages:
        key = chain_key(key, page)
        keys.append(key)
    return keys


class Node:
    """A run of pages. `device` and `host` are page numbers, or None when it is not there."""

    __slots__ = (
        "children", "copying", "depth", "device", "device_locks", "hits", "host", "host_locks",
        "keys", "pages", "parent", "stored", "tick", "worth",
    )  # fmt: skip

    def __init__(self, parent: Node | None, pages: list[Page], keys: list[bytes]) -> None:
        self.parent = parent
        self.pages = pages
        self.keys = keys
        self.children: dict[Page, Node] = {}
        self.device: list[int] | None = None
        self.host: list[int] | None = None
        self.device_locks = 0  # requests that use it or a descendant
        self.host_locks = 0  # copies from or into its host pages
        self.copying = False  # to the host; set by the owner of the tree
        self.stored = False  # once, by us; whether the store has it still is asked there
        self.hits = 0
        self.tick = 0  # of the last use
        self.worth = 0.0  # for the eviction policy
        self.depth: int = parent.depth + len(parent.pages) if parent else 0  # pages before it

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def path(self) -> Iterator[Node]:
        """From the first node under the root down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and not node.is_root:
            nodes.append(node)
            node = node.parent
        return reversed(nodes)


@dataclass(slots=True)
class Match:
    """The longest cached prefix. `device` pages lead, `host` pages follow them."""

    last_device: Node  # of the part on the device; a root when nothing is
    last: Node  # of the whole
    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    host_nodes: list[Node] = field(default_factory=list)

    @property
    def pages(self) -> int:
        return len(self.device) + len(self.host)


@dataclass(slots=True)
class Freed:
    """Pages that eviction gave back, by tier, and how many left the process for good."""

    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    dropped: int = 0


class RadixTree:
    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self._policy = policy or LruEviction()
        self._roots: dict[str, Node] = {}  # of namespaces with pages
        self._names: dict[Node, str] = {}  # of the roots
        self._tick = 0
        self.device_pages = 0
        self.host_pages = 0

    # --- finding ---

    def match(self, namespace: str, pages: Sequence[Page]) -> Match:
        """Counts as a use of what matches."""
        node = self._root(namespace)
        match = Match(node, node)
        self._tick += 1
        at = 0
        while at < len(pages) and (child := node.children.get(pages[at])) is not None:
            same = _common(child.pages, pages[at:])
            if same < len(child.pages):
                child = self._split(child, same)
            self._use(child)
            if child.device is not None:
                match.device += child.device
                match.last_device = child
            else:
                assert child.host is not None
                match.host += child.host
                match.host_nodes.append(child)
            match.last = node = child
            at += same
        return match

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots; parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if not node.is_root:
                yield node
            stack.extend(node.children.values())

    # --- adding ---

    def insert_device(
        self, namespace: str, pages: Sequence[Page], device: Sequence[int]
    ) -> tuple[Node, list[int]]:
        """These pages are on the device now. Answers the last node and the given pages that are
        not needed, because the tree has others with the same tokens: the caller's again."""
        self._check(pages, device)
        return self._insert(namespace, pages, list(device), on_device=True)

    def insert_host(
        self, namespace: str, pages: Sequence[Page], host: Sequence[int], skip: int = 0
    ) -> tuple[Node, list[int]]:
        """These pages, from the `skip`th on, are on the host now; the first `skip` are in the tree.
        Answers as insert_device. Where the middle is missing meanwhile, nothing is inserted."""
        self._check(pages[skip:], host)
        if skip and self.match(namespace, pages[:skip]).pages < skip:
            return self._root(namespace), list(host)
        return self._insert(namespace, pages, [-1] * skip + list(host), on_device=False)

    def add_host(self, node: Node, host: list[int]) -> None:
        """The node of the device has a copy on the host now."""
        assert node.host is None
        assert len(host) == len(node.pages)
        node.host = host
        self.host_pages += len(host)

    def add_device(self, node: Node, device: list[int]) -> None:
        """The node of the host has a copy on the device now, as its parent has."""
        assert node.device is None
        assert len(device) == len(node.pages)
        assert node.parent is not None
        assert node.parent.is_root or node.parent.device is not None
        node.device = device
        self.device_pages += len(device)

    def cut(self, node: Node, count: int) -> None:
        """Make nodes of at most `count` pages out of it. It stays the last of them, with its locks;
        a node that is being copied is left as it is."""
        if not node.copying:
            while len(node.pages) > count:
                self._split(node, count)

    # --- locks ---

    def lock(self, node: Node) -> None:
        """Nothing from this node to the root leaves the device, or the tree, until `unlock`."""
        for each in node.path():
            each.device_locks += 1

    def unlock(self, node: Node) -> None:
        for each in node.path():
            assert each.device_locks > 0
            each.device_locks -= 1

    def lock_host(self, node: Node) -> None:
        """Host pages from this node to the root stay where they are until `unlock_host`: they are
        being copied."""
        for each in node.path():
            each.host_locks += 1

    def unlock_host(self, node: Node) -> None:
        for each in node.path():
            assert each.host_locks > 0
            each.host_locks -= 1

    # --- eviction ---

    def evict_device(self, count: int, demote: Callable[[Node], bool] = lambda _: False) -> Freed:
        """Take at least `count` pages from the device, or all that are not locked. A node without a
        host copy is offered to `demote` (which may make one, and answers whether it did), else it
        leaves the tree."""
        freed = Freed()
        heap = self._heap(lambda node: node.device is not None and self._is_device_leaf(node))
        while heap and len(freed.device) < count:
            _, _, node = heapq.heappop(heap)
            self._policy.evicted(node)
            parent = node.parent
            if node.host is None and not demote(node):
                self._remove(node, freed)
            else:
                self._leave_device(node, freed)
            if parent is not None and self._may_leave_device(parent):
                heapq.heappush(heap, self._entry(parent))
        return freed

    def evict_host(self, count: int) -> Freed:
        """Take at least `count` pages from the host, or all that can be: first of nodes that are
        there alone, then copies of what is on the device, which is in use more."""
        freed = Freed()
        alone = self._heap(self._is_host_leaf)
        while alone and len(freed.host) < count:
            _, _, node = heapq.heappop(alone)
            self._policy.evicted(node)
            parent = node.parent
            self._remove(node, freed)
            if parent is not None and self._is_host_leaf(parent):
                heapq.heappush(alone, self._entry(parent))
        copies = [] if len(freed.host) >= count else self._heap(_is_copy)
        while copies and len(freed.host) < count:
            _, _, node = heapq.heappop(copies)
            assert node.host is not None
            freed.host += node.host
            self.host_pages -= len(node.host)
            node.host = None
        return freed

    def clear(self) -> Freed:
        """Everything that is not locked."""
        freed = self.evict_device(self.device_pages)
        more = self.evict_host(self.host_pages)
        return Freed(freed.device, freed.host + more.host, freed.dropped + more.dropped)

    # --- inside ---

    def _root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = Node(None, [], [hashlib.sha256(namespace.encode()).digest()])
        return root

    @staticmethod
    def _check(pages: Sequence[Page], numbers: Sequence[int]) -> None:
        if len(pages) != len(numbers):
            raise UsageError("one page number a page", pages=len(pages), numbers=len(numbers))

    def _use(self, node: Node) -> None:
        node.tick = self._tick
        node.hits += 1
        self._policy.used(node)

    def _split(self, node: Node, count: int) -> Node:
        """The first `count` pages become a node of their own, with the same locks: answers it."""
        assert node.parent is not None
        assert 0 < count < len(node.pages)
        front = Node(node.parent, node.pages[:count], node.keys[:count])
        front.device_locks, front.host_locks = node.device_locks, node.host_locks
        front.hits, front.tick, front.worth = node.hits, node.tick, node.worth
        front.copying, front.stored = node.copying, node.stored
        if node.device is not None:
            front.device, node.device = node.device[:count], node.device[count:]
        if node.host is not None:
            front.host, node.host = node.host[:count], node.host[count:]
        node.parent.children[front.pages[0]] = front
        node.pages, node.keys = node.pages[count:], node.keys[count:]
        node.parent, node.depth = front, front.depth + count
        front.children[node.pages[0]] = node
        return front

    def _insert(
        self, namespace: str, pages: Sequence[Page], numbers: list[int], *, on_device: bool
    ) -> tuple[Node, list[int]]:
        node = self._root(namespace)
        self._tick += 1
        spare: list[int] = []
        at = 0
        while at < len(pages) and (child := node.children.get(pages[at])) is not None:
            same = _common(child.pages, pages[at:])
            if same < len(child.pages):
                child = self._split(child, same)
            given = numbers[at : at + same]
            held = child.device if on_device else child.host
            if held is not None or (not on_device and child.device is not None):
                known = set(held or ())
                spare += [number for number in given if number >= 0 and number not in known]
            elif on_device:
                self.add_device(child, given)
            child.tick = self._tick
            node = child
            at += same
        if at == len(pages):
            return node, spare
        if node.is_root:
            self._roots[namespace], self._names[node] = node, namespace
        new = Node(node, list(pages[at:]), self._keys(node, pages[at:]))
        new.tick = self._tick
        if on_device:
            self.add_device(new, numbers[at:])
        else:
            self.add_host(new, numbers[at:])
        node.children[new.pages[0]] = new
        self._policy.used(new)
        return new, spare

    @staticmethod
    def _keys(node: Node, pages: Sequence[Page]) -> list[bytes]:
        key, keys = node.keys[-1], []
        for page in pages:
            key = chain_key(key, page)
            keys.append(key)
        return keys

    def _heap(self, wanted: Callable[[Node], bool]) -> list[tuple[float, int, Node]]:
        heap = [
            self._entry(node) for node in self.nodes() if not node.device_locks and wanted(node)
        ]
        heapq.heapify(heap)
        return heap

    def _entry(self, node: Node) -> tuple[float, int, Node]:
        return self._policy.priority(node), id(node), node

    @staticmethod
    def _is_device_leaf(node: Node) -> bool:
        return all(child.device is None for child in node.children.values())

    def _may_leave_device(self, node: Node) -> bool:
        return (
            not node.is_root
            and node.device is not None
            and not node.device_locks
            and self._is_device_leaf(node)
        )

    @staticmethod
    def _is_host_leaf(node: Node) -> bool:
        return (
            not node.is_root
            and node.device is None
            and not node.children
            and not node.host_locks
            and not node.device_locks
        )

    def _leave_device(self, node: Node, freed: Freed) -> None:
        assert node.device is not None
        freed.device += node.device
        self.device_pages -= len(node.device)
        node.device = None

    def _remove(self, node: Node, freed: Freed) -> None:
        """The node and what lives below it on the host alone, which could not be reached any more.
        A node that is being copied, or has such a descendant, keeps its place."""
        below = [node]
        for each in below:
            below += each.children.values()
        if any(each.host_locks or each.device_locks for each in below):
            return
        for each in below:
            if each.device is not None:
                self._leave_device(each, freed)
            if each.host is not None:
                freed.host += each.host
                self.host_pages -= len(each.host)
                each.host = None
            freed.dropped += len(each.pages)
        parent = node.parent
        assert parent is not None
        del parent.children[node.pages[0]]
        if parent.is_root and not parent.children:
            del self._roots[self._names.pop(parent)]


def _is_copy(node: Node) -> bool:
    return node.device is not None and node.host is not None and not node.host_locks


def _common(a: Sequence[Page], b: Sequence[Page]) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count
