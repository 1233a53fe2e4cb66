"""A process that packs rows: ``python -m hybridrl.data.packing_child DESCRIPTOR``."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from hybridrl.data.packing import Packer
from hybridrl.errors import HybridRLError


def main() -> None:
    """Take a packer, then rows until the other end closes; answer each message."""
    connection: Connection = Connection(int(sys.argv[1]))
    with connection, suppress(EOFError, ConnectionError):
        packer: Packer = connection.recv()
        connection.send(None)
        while True:
            raws = connection.recv()
            try:
                connection.send(packer(raws))
            except HybridRLError as error:
                connection.send(error)


if __name__ == "__main__":
    main()
