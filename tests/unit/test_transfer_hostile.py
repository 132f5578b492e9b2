"""Strangers and peers that do not keep to the protocol: refused and counted, others are served."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from mooncake_py.errors import PeerUnreachable, TransferTimeout, VersionMismatch
from mooncake_py.transfer import EngineOptions, Peer, TransferEngine

MS = 10_000
MAGIC = 0x5445434D
HELLO, CHOICE, LANE, READY = 1, 2, 3, 4
TCP = 4
MESSAGE, REPLY, READ, DATA, WRITE, PULL, QUERY, CREDIT = 1, 2, 3, 4, 5, 6, 8, 12
HELLO_FORMAT = struct.Struct("<IHHIi16s16s16sQIIIIIIII40s128s")
FRAME_FORMAT = struct.Struct("<IHHQIIQ")


def hello(step: int, **other: int) -> bytes:
    return HELLO_FORMAT.pack(
        other.get("magic", MAGIC), other.get("major", 2), 0, step, 0, os.urandom(16), b"", b"", 0,
        TCP, 1 << 20, 0, other.get("choice", 0), 0, 0, 0, 0, b"", b"",
    )  # fmt: skip


def frame(kind: int, body: bytes = b"", *, nbytes: int | None = None, **words: int) -> bytes:
    size = len(body) if nbytes is None else nbytes
    head = FRAME_FORMAT.pack(
        size, kind, 0, words.get("tag", 0), words.get("a", 0), words.get("b", 0), words.get("c", 0)
    )
    return head + body


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    options = EngineOptions(listen="127.0.0.1:0", transports=("tcp",), message_max_bytes=1 << 20)
    with TransferEngine(options) as engine:
        yield engine


def dial(engine: TransferEngine) -> socket.socket:
    host, port = engine.address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=MS / 1000)
    sock.settimeout(MS / 1000)
    return sock


def take(sock: socket.socket, nbytes: int) -> bytes:
    got = b""
    while len(got) < nbytes:
        more = sock.recv(nbytes - len(got))
        if not more:
            break
        got += more
    return got


def become_peer(engine: TransferEngine) -> socket.socket:
    sock = dial(engine)
    sock.sendall(hello(HELLO))
    assert len(take(sock, HELLO_FORMAT.size)) == HELLO_FORMAT.size
    sock.sendall(hello(CHOICE, choice=TCP))
    assert len(take(sock, HELLO_FORMAT.size)) == HELLO_FORMAT.size
    return sock


def is_cut(sock: socket.socket) -> bool:
    try:
        while sock.recv(65_536):
            pass
    except ConnectionResetError:
        pass
    return True  # a socket that stays open raises TimeoutError instead


def serves_others(engine: TransferEngine) -> bool:
    with TransferEngine(EngineOptions(transports=("tcp",))) as other:
        peer = other.open(engine.address, timeout_ms=MS)
        peer.send(1, b"hello", timeout_ms=MS)
        message = engine.inbox.receive(MS)
        return message is not None and message.payload == b"hello"


def no_peers_left(engine: TransferEngine) -> bool:
    """Wait until the engine has noticed; its socket is cut a moment before the peer is gone."""
    return any(not engine.describe()["peers"] or engine.inbox.receive(10) for _ in range(MS // 10))


def refused(engine: TransferEngine) -> int:
    return int(engine.describe()["refused"])


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4, hello(HELLO, magic=1)])
def test_something_else_than_an_engine_is_cut(engine: TransferEngine, opening: bytes) -> None:
    sock = dial(engine)
    sock.sendall(opening)
    assert is_cut(sock)
    assert refused(engine) == 1
    assert serves_others(engine)


@pytest.mark.parametrize("step", [CHOICE, LANE, READY, 99])
def test_a_stranger_out_of_step_is_cut(engine: TransferEngine, step: int) -> None:
    sock = dial(engine)
    sock.sendall(hello(step))
    assert is_cut(sock)
    assert refused(engine) == 1
    assert engine.describe()["peers"] == []


def test_a29_another_protocol_version_is_named_to_both() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def answer() -> None:
        sock, _ = listener.accept()
        take(sock, HELLO_FORMAT.size)
        sock.sendall(hello(HELLO, major=9))
        sock.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with TransferEngine() as engine, pytest.raises(VersionMismatch, match=r"2\.1.*9\.0"):
        engine.open(f"127.0.0.1:{port}", timeout_ms=MS)
    thread.join()
    listener.close()


def test_a29_a_caller_of_another_version_gets_our_version(engine: TransferEngine) -> None:
    sock = dial(engine)
    sock.sendall(hello(HELLO, major=9))
    answer = HELLO_FORMAT.unpack(take(sock, HELLO_FORMAT.size))
    assert answer[:2] == (MAGIC, 2)
    assert answer[4] == -VersionMismatch.code
    assert is_cut(sock)
    assert refused(engine) == 1


def test_a_slow_stranger_is_dropped_and_does_not_hold_up_others(engine: TransferEngine) -> None:
    slow = [dial(engine) for _ in range(20)]
    for sock in slow:
        sock.sendall(hello(HELLO)[:10])
    assert serves_others(engine)
    assert all(is_cut(sock) for sock in slow)  # by the engine's own deadline
    assert engine.describe()["queues"]["strangers"] == 0


READ_ENTRY = struct.Struct("<QIIQQ")
BAD_FRAMES = {
    "unknown type": frame(77),
    "type zero": frame(0),
    "message above the limit": frame(MESSAGE, nbytes=(1 << 20) + 1),
    "message of 4 GiB": frame(MESSAGE, nbytes=(1 << 32) - 1),
    "reply above the limit": frame(REPLY, nbytes=(1 << 32) - 1),
    "read with a wrong count": frame(READ, b"x" * 64, a=3),
    "read with too many": frame(READ, a=1 << 30, nbytes=(1 << 30) & 0xFFFFFFFF),
    "read of a huge part": frame(READ, READ_ENTRY.pack(1, 1, 0, 0, 1 << 62), a=1),
    "data above the part": frame(DATA, nbytes=(1 << 20) + 1),
    "data with a positive status": frame(DATA, a=5),
    "write above the part": frame(WRITE, nbytes=(1 << 20) + 1),
    "a shared memory frame on tcp": frame(QUERY, a=1),
    "a pull on tcp": frame(PULL, b"\0" * 40, a=1),
}


@pytest.mark.parametrize("bad", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_a34_a_frame_against_the_protocol_ends_that_peer_only(
    engine: TransferEngine, bad: bytes
) -> None:
    sock = become_peer(engine)
    sock.sendall(bad)
    assert is_cut(sock)
    assert refused(engine) >= 1
    assert no_peers_left(engine)
    assert serves_others(engine)


def test_a34_unknown_parts_and_replies_are_dropped(engine: TransferEngine) -> None:
    sock = become_peer(engine)
    sock.sendall(
        frame(DATA, b"z" * 100_000, tag=12345)
        + frame(REPLY, b"nobody asked", tag=99)
        + frame(MESSAGE, b"after", a=3)
    )
    message = engine.inbox.receive(MS)
    assert message is not None
    assert (message.kind, message.payload) == (3, b"after")
    sock.close()


def test_a34_replayed_frames_change_nothing(engine: TransferEngine) -> None:
    """An answer that was recorded, and data, are sent again: they answer nothing any more. Nor does
    a recorded greeting join a peer that is gone."""
    sock = become_peer(engine)
    sock.sendall(frame(CREDIT, c=1 << 20) + frame(MESSAGE, b"", a=3))
    message = engine.inbox.receive(MS)
    assert message is not None
    answers: list[bytes] = []
    peer, old = engine.peer(message.peer_id), b""

    def ask() -> None:
        answers.append(peer.request(5, b"ask", timeout_ms=MS))

    for i in range(3):
        asking = threading.Thread(target=ask)
        asking.start()
        head = FRAME_FORMAT.unpack(take(sock, FRAME_FORMAT.size))
        while head[1] != MESSAGE:
            take(sock, head[0])
            head = FRAME_FORMAT.unpack(take(sock, FRAME_FORMAT.size))
        take(sock, head[0])
        sock.sendall(old)  # of the question before
        fresh = frame(REPLY, b"answer %d" % i, tag=head[3])
        sock.sendall(fresh + fresh + frame(DATA, b"z" * 100, tag=head[3]))
        asking.join(MS / 1000)
        old = fresh
    assert answers == [b"answer 0", b"answer 1", b"answer 2"]
    sock.close()
    assert no_peers_left(engine)
    before, again = refused(engine), dial(engine)
    again.sendall(hello(LANE))
    assert is_cut(again)
    assert refused(engine) == before + 1
    assert serves_others(engine)


def test_a74_a_peer_that_does_not_read_is_bounded(engine: TransferEngine) -> None:
    memory = bytearray(1 << 20)
    region = engine.register(memory)
    sock = become_peer(engine)
    entry = READ_ENTRY.pack(1, region.id, 0, 0, 1 << 20)
    request = frame(READ, entry * 1024, a=1024)
    sock.settimeout(1.0)
    with pytest.raises(TimeoutError):  # it stops listening to us
        sock.sendall(request * 1024)  # asks for a TiB
    assert serves_others(engine)
    region.close()  # does not wait for the peer
    memory.append(0)  # and the memory is ours again
    sock.close()


def send_for_ever(peer: Peer) -> None:
    while True:
        peer.send(1, bytes(1 << 16), timeout_ms=300)


def test_a74_messages_nobody_takes_stop_their_sender() -> None:
    options = EngineOptions(
        listen="127.0.0.1:0", transports=("tcp",), message_max_bytes=1 << 16,
        queue_max_bytes=1 << 18,
    )  # fmt: skip
    with TransferEngine(options) as engine, TransferEngine(options) as other:
        peer = other.open(engine.address, timeout_ms=MS)
        with pytest.raises(TransferTimeout):
            send_for_ever(peer)
        assert engine.describe()["queues"]["message_bytes"] <= (1 << 18) + 64
        taken = 0
        while engine.inbox.receive(200) is not None:
            taken += 1
        assert taken > 4
        peer.send(2, b"goes on", timeout_ms=MS)


def test_a_peer_that_hangs_up_in_the_middle_of_a_message(engine: TransferEngine) -> None:
    for _ in range(50):
        sock = become_peer(engine)
        sock.sendall(frame(MESSAGE, b"x" * 1000, nbytes=100_000))
        sock.close()
    assert serves_others(engine)
    assert engine.describe()["queues"]["message_bytes"] == 0


def test_nobody_there_is_unreachable_and_a_mute_listener_times_out() -> None:
    with TransferEngine() as engine:
        free = socket.create_server(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(TransferTimeout):
            engine.open(f"127.0.0.1:{port}", timeout_ms=100)
        free.close()
        with pytest.raises(PeerUnreachable):
            engine.open(f"127.0.0.1:{port}", timeout_ms=MS)
