"""A process that encodes rows: ``python -m hybridrl.data.encoder_child DESCRIPTOR``."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from hybridrl.data.encoding import RowEncoder
from hybridrl.errors import HybridRLError


def main() -> None:
    """Take an encoder, then rows until the other end closes; answer each message."""
    connection: Connection = Connection(int(sys.argv[1]))
    with connection, suppress(EOFError, ConnectionError):
        encoder: RowEncoder = connection.recv()
        connection.send(None)
        while True:
            raws = connection.recv()
            try:
                connection.send(encoder(raws))
            except HybridRLError as error:
                connection.send(error)


if __name__ == "__main__":
    main()
