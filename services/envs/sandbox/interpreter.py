"""The interpreter inside a sandbox that keeps a model's variables from one piece of code to the next.

Run by the supervisor as `python -I -S -c THIS_FILE`: only the standard library, no import of ours. Reads pieces of
source from file descriptor 3, each after its length, and answers each with its exit status on descriptor 4. From the
first piece on nothing that it says can be trusted; whoever listens only passes it on to the model.
"""

import os
import struct
import sys
import traceback

REQUESTS, REPLIES = 3, 4


def main() -> None:
    requests = os.fdopen(REQUESTS, "rb")
    os.set_inheritable(REQUESTS, False)
    os.set_inheritable(REPLIES, False)
    namespace: dict = {"__name__": "__main__", "__builtins__": __builtins__}
    while True:
        header = requests.read(4)
        if len(header) < 4:
            return
        source = requests.read(struct.unpack("!I", header)[0]).decode("utf-8", "surrogatepass")
        status = run(source, namespace)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):  # the code may have closed or replaced it
                status = status or 1
        os.write(REPLIES, struct.pack("!i", status))


def run(source: str, namespace: dict) -> int:
    """Runs one piece; its exit status."""
    try:
        exec(compile(source, "<code>", "exec"), namespace)
    except SystemExit as stopped:
        code = stopped.code
        if code is None:
            return 0
        if isinstance(code, int):
            return code & 0xFF
        print(code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - any exception of the code is shown to who wrote it
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        try:
            traceback.print_exception(type(error), error, frames, file=sys.stderr)
        except BaseException:  # noqa: BLE001 - its own __str__ may raise, or memory be short
            os.write(2, type(error).__name__.encode("utf-8", "replace") + b"\n")
        return 1
    return 0


if __name__ == "__main__":
    main()
