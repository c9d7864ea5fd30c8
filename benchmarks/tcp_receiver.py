"""Receives bytes over a bare socket, a JSON line each time: `python -m benchmarks.tcp_receiver PORT BYTES TIMES`."""

from __future__ import annotations

import json
import socket
import sys
import time

READ_BYTES = 1024 * 1024


def main() -> None:
    """Asks with one byte, and reads into memory that is there already."""
    port, size, times = map(int, sys.argv[1:])
    buffer = memoryview(bytearray(size))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(times):
            start_s, cpu_s = time.perf_counter(), time.process_time()
            connection.sendall(b"g")
            filled = 0
            while filled < size:
                filled += connection.recv_into(buffer[filled : filled + READ_BYTES])
            line = {"seconds": time.perf_counter() - start_s, "cpu_s": time.process_time() - cpu_s}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
