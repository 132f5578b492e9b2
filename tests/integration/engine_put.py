"""An engine's process that stores pages until it is killed, for test_engine_restart.py.

python engine_put.py MASTER PAGES PAGE_BYTES
"""

from __future__ import annotations

import sys

from mooncake_py import StoreClient


def value(number: int, nbytes: int) -> bytes:
    return number.to_bytes(8, "little") * (nbytes // 8)


def main() -> None:
    master, pages, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with StoreClient(master) as client, client.alloc(nbytes) as memory:
        view = memory.view()
        for number in range(pages):
            view[:] = value(number, nbytes)
            client.put(f"page/{number}", view)
        print("stored", flush=True)
        number = 0
        while True:  # until SIGKILL, in the middle of a put
            client.put(f"more/{number}", view)
            number += 1
            client.remove(f"more/{number - 1}", force=True)


if __name__ == "__main__":
    main()
