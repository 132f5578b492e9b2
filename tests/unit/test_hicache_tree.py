"""The radix tree of cached pages against a dictionary."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_py.errors import UsageError
from mooncake_py.hicache.eviction import POLICIES, CostEviction
from mooncake_py.hicache.radix_tree import (
    Match,
    Node,
    Page,
    RadixTree,
    chain_keys,
    split_pages,
)

PAGE = 2
tokens = st.lists(st.integers(0, 2), max_size=14)
namespaces = st.sampled_from(["", "adapter"])


class Pages:
    """Page numbers of one tier, each in one place."""

    def __init__(self) -> None:
        self.next = itertools.count()
        self.used: set[int] = set()

    def take(self, count: int) -> list[int]:
        taken = [next(self.next) for _ in range(count)]
        self.used |= set(taken)
        return taken

    def give_back(self, pages: list[int]) -> None:
        assert len(set(pages)) == len(pages)
        assert set(pages) <= self.used, "freed twice, or never taken"
        self.used -= set(pages)


class Tree(RuleBasedStateMachine):
    """The model: (namespace, prefix) -> the numbers its last page has on device and host."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.device, self.host = Pages(), Pages()
        self.model: dict[tuple[str, tuple[Page, ...]], list[int | None]] = {}
        self.locked: list[tuple[Node, str, list[Page]]] = []

    def known(self, namespace: str, pages: list[Page]) -> list[list[int | None]]:
        found = []
        for end in range(1, len(pages) + 1):
            entry = self.model.get((namespace, tuple(pages[:end])))
            if entry is None:
                break
            found.append(entry)
        return found

    def check_match(self, namespace: str, pages: list[Page]) -> Match:
        match = self.tree.match(namespace, pages)
        found = self.known(namespace, pages)
        on_device = list(itertools.takewhile(lambda entry: entry[0] is not None, found))
        assert match.device == [entry[0] for entry in on_device]
        assert match.host == [entry[1] for entry in found[len(on_device) :]]
        return match

    @rule(namespace=namespaces, text=tokens)
    def match(self, namespace: str, text: list[int]) -> None:
        self.check_match(namespace, split_pages(text, PAGE))

    @rule(namespace=namespaces, text=tokens)
    def compute(self, namespace: str, text: list[int]) -> None:
        """A request: uses what is on the device, computes the rest, inserts all."""
        pages = split_pages(text, PAGE)
        match = self.check_match(namespace, pages)
        numbers = match.device + self.device.take(len(pages) - len(match.device))
        _, spare = self.tree.insert_device(namespace, pages, numbers)
        self.device.give_back(spare)
        for end, number in enumerate(numbers, 1):
            entry = self.model.setdefault((namespace, tuple(pages[:end])), [None, None])
            if entry[0] is None:
                entry[0] = number

    @rule(namespace=namespaces, text=tokens, skip=st.integers(0, 7))
    def prefetch(self, namespace: str, text: list[int], skip: int) -> None:
        pages = split_pages(text, PAGE)
        skip = min(skip, len(pages))
        given = self.host.take(len(pages) - skip)
        _, spare = self.tree.insert_host(namespace, pages, given, skip)
        self.host.give_back(spare)
        if len(self.known(namespace, pages[:skip])) < skip:
            assert spare == given
            return
        for end, number in enumerate(given, skip + 1):
            self.model.setdefault((namespace, tuple(pages[:end])), [None, number])

    @rule(namespace=namespaces, text=tokens)
    def back_up(self, namespace: str, text: list[int]) -> None:
        pages = split_pages(text, PAGE)
        at = 0
        for node in self.check_match(namespace, pages).last.path():
            at += len(node.pages)
            if node.host is None:
                numbers = self.host.take(len(node.pages))
                self.tree.add_host(node, numbers)
                for i, number in enumerate(numbers):
                    end = at - len(numbers) + i + 1
                    self.model[namespace, tuple(pages[:end])][1] = number

    @rule(namespace=namespaces, text=tokens)
    def lock(self, namespace: str, text: list[int]) -> None:
        pages = split_pages(text, PAGE)
        match = self.check_match(namespace, pages)
        self.tree.lock(match.last_device)
        self.locked.append((match.last_device, namespace, pages[: len(match.device)]))

    @precondition(lambda self: self.locked)
    @rule()
    def unlock(self) -> None:
        node, namespace, pages = self.locked.pop(0)
        assert len(self.check_match(namespace, pages).device) == len(pages)
        self.tree.unlock(node)

    @rule(namespace=namespaces, text=tokens, count=st.integers(1, 3))
    def cut(self, namespace: str, text: list[int], count: int) -> None:
        pages = split_pages(text, PAGE)
        node = self.check_match(namespace, pages).last
        if not node.is_root:
            self.tree.cut(node, count)
            assert len(node.pages) <= count
        self.check_match(namespace, pages)

    @rule(count=st.integers(0, 6), demotes=st.booleans())
    def evict_device(self, count: int, demotes: bool) -> None:
        def demote(node: Node) -> bool:
            if demotes:
                self.tree.add_host(node, self.host.take(len(node.pages)))
            return demotes

        before = len(self.device.used)
        freed = self.tree.evict_device(count, demote)
        self.device.give_back(freed.device)
        self.host.give_back(freed.host)
        assert before - len(self.device.used) == len(freed.device)
        self.look_again()

    @rule(count=st.integers(0, 6))
    def evict_host(self, count: int) -> None:
        freed = self.tree.evict_host(count)
        assert not freed.device
        self.host.give_back(freed.host)
        self.look_again()

    @rule()
    def clear(self) -> None:
        freed = self.tree.clear()
        self.device.give_back(freed.device)
        self.host.give_back(freed.host)
        self.look_again()
        if not self.locked:
            assert not self.model

    def look_again(self) -> None:
        """After an eviction the model is what the tree says, which may only have lost something."""
        now: dict[tuple[str, tuple[Page, ...]], list[int | None]] = {}
        for root_name, root in self.tree._roots.items():
            stack = [(child, ()) for child in root.children.values()]
            while stack:
                node, before = stack.pop()
                for i in range(len(node.pages)):
                    numbers = [tier[i] if tier else None for tier in (node.device, node.host)]
                    now[root_name, before + tuple(node.pages[: i + 1])] = numbers
                stack += [(c, before + tuple(node.pages)) for c in node.children.values()]
        assert set(now) <= set(self.model)
        self.model = now

    @invariant()
    def rules_hold(self) -> None:
        device: list[int] = []
        host: list[int] = []
        for node in self.tree.nodes():
            assert node.parent is not None
            assert node.pages
            assert node.device is not None or node.host is not None
            assert node.parent.children[node.pages[0]] is node
            assert node.depth == node.parent.depth + len(node.parent.pages)
            if node.device is not None:
                assert node.parent.is_root or node.parent.device is not None
                assert len(node.device) == len(node.pages)
                device += node.device
            if node.host is not None:
                assert len(node.host) == len(node.pages)
                host += node.host
        assert sorted(device) == sorted(self.device.used)
        assert sorted(host) == sorted(self.host.used)
        assert (self.tree.device_pages, self.tree.host_pages) == (len(device), len(host))
        for name, root in self.tree._roots.items():
            assert root.children, f"an empty namespace stays: {name}"


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a61_keys_are_the_same_in_every_process_and_namespace_apart() -> None:
    pages = split_pages([1, 2, 3, 4, 5], 2)
    assert pages == [(1, 2), (3, 4)]
    keys = chain_keys("model", split_pages([1, 2, 3, 4], 2))
    assert keys[1].hex() == "b1dea6538341c568e6099eab5dae982c3c6dd108fed60f6ba07fb5a86f962e57"
    assert chain_keys("model", pages[:1]) == keys[:1]
    assert not set(chain_keys("other", pages)) & set(keys)
    tree = RadixTree()
    node, _ = tree.insert_device("model", pages, [0, 1])
    assert node.keys == keys


@pytest.mark.parametrize("name", POLICIES)
def test_the_tail_goes_before_its_middle(name: str) -> None:
    tree = RadixTree(POLICIES[name]())
    pages = [(i,) for i in range(10)]
    tree.insert_device("", pages, range(10))
    tree.match("", pages[:4])
    tree.match("", pages[:7])
    assert sorted(tree.evict_device(3).device) == [7, 8, 9]
    assert sorted(tree.evict_device(1).device) == [4, 5, 6]
    assert tree.match("", pages).device == [0, 1, 2, 3]


def test_cost_keeps_what_is_dear_to_compute() -> None:
    tree = RadixTree(CostEviction(attention_share=1.0))
    long = [(0, i) for i in range(50)]
    tree.insert_device("", long, range(50))
    tree.match("", long[:40])
    tree.insert_device("", [(1, 1)], [50])
    assert tree.evict_device(1).device == [50]


def test_old_fame_fades() -> None:
    tree = RadixTree(CostEviction())
    tree.insert_device("", [(0,)], [0])
    for _ in range(5):
        tree.match("", [(0,)])
    evicted = []
    for number in range(1, 40):
        tree.insert_device("", [(number,)], [number])
        tree.match("", [(number,)])
        if number > 3:
            evicted += tree.evict_device(1).device
    assert 0 in evicted


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="one page number a page"):
        RadixTree().insert_device("", [(1,)], [])
