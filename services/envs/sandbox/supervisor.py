"""The first process inside a sandbox: runs what it is told to, kills it in time, and reports.

It alone is trusted in there. It is one file because it travels: it needs nothing but the standard library (Python 3.9
or newer), for a container's image holds no code of ours. There it is started as `python3 -I -S -c THIS_FILE CONFIG`; in
the strength `process` jail.py has shut it in and calls it. Requests come on stdin and answers go to stdout, each one
JSON object after its length in four bytes; bytes travel as base64. Between requests it waits for the next; while a
program runs it waits for the program, its output, its deadline, and the end of stdin, at which it kills everything and
exits.
"""

import base64
import contextlib
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time

MAX_REQUEST_BYTES = 256 << 20
READ_BYTES = 1 << 16
WATCH_S = 0.2
CODE_FDS = (3, 4)  # where interpreter.py reads source and answers
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38


class Gone(Exception):
    """Whoever sends requests is there no more."""


class Supervisor:
    """State: the scratch directory, and the interpreter while there is one."""

    def __init__(self, config, confine=lambda: None):
        """`confine` takes rights from each child before it runs anything, beyond its resource limits."""
        self._config = config
        self._limits = config["limits"]
        self._scratch = config["scratch"]
        self._confine = confine
        self._requests, self._answers = _move_protocol()
        self._interpreter = None
        self._woken, waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._leader = None  # process id of the command or interpreter
        self._leader_status = None

    def serve(self):
        """Answers requests until stdin ends."""
        operations = {"code": self._code, "command": self._command, "write": self._write, "read": self._read}
        try:
            self._send({"ready": os.getpid()})
            while True:
                request = self._receive()
                try:
                    answer = operations[request["operation"]](request)
                except (OSError, MemoryError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                self._send(answer)
        except Gone:
            pass
        finally:
            self._kill_all()
            if self._config["watch_scratch"]:  # on a disk, and a server that was killed removes nothing
                self._empty_scratch()

    def _code(self, request):
        deadline = time.monotonic() + request["deadline_s"]
        if self._interpreter is None:
            self._interpreter = self._spawn(
                [self._config["python"], "-I", "-S", "-c", self._config["interpreter"]], True
            )
        child = self._interpreter
        source = base64.b64decode(request["source"])
        child.to_write = struct.pack("!I", len(source)) + source
        _drain(child.replies)
        run = self._watch(child, deadline, until_reply=True)
        if run.status is None or self._leader_status is not None:
            self._kill_all()
            run.state_lost = True
        return run.answer()

    def _command(self, request):
        deadline = time.monotonic() + request["deadline_s"]
        self._kill_all()
        child = self._spawn(request["argv"], False)
        child.to_write = base64.b64decode(request["stdin"])
        run = self._watch(child, deadline, until_reply=False)
        self._kill_all()
        return run.answer()

    def _watch(self, child, deadline, until_reply):
        """Waits for what the program does. Ends with it, with its reply, at the deadline or at the output limit."""
        run = Run(self._limits["output_bytes"])
        poll = select.poll()
        poll.register(self._requests, 0)  # only its hang-up
        poll.register(self._woken, select.POLLIN)
        for fd in (*child.outputs, *([child.replies] if until_reply else ())):
            poll.register(fd, select.POLLIN)
        if child.to_write or not until_reply:
            poll.register(child.input, select.POLLOUT)
        reply = b""
        while True:
            left = deadline - time.monotonic()
            if self._scratch_is_full():
                self._empty_scratch()
                run.ending = "scratch"
                return run
            if left <= 0:
                run.ending = "deadline"
                return run
            for fd, events in poll.poll(min(left, WATCH_S) * 1000):
                if fd == self._requests:
                    raise Gone
                if fd == self._woken:
                    _drain(fd)
                elif fd == child.input:
                    if not child.feed(events, close_after=not until_reply):
                        poll.unregister(fd)
                elif fd == child.replies:
                    received = _read_ready(fd)
                    reply += (received or b"")[: 4 - len(reply)]  # the code can open its end and read what it wrote
                    if received == b"":
                        poll.unregister(fd)
                elif not run.take(child.outputs.index(fd), fd):
                    poll.unregister(fd)
            if run.over_limit:
                run.ending = "output"
                return run
            self._reap()
            ended = self._leader_status is not None
            if ended or len(reply) == 4:
                run.status = self._leader_status if ended else struct.unpack("!i", reply)[0]
                if not until_reply:
                    self._kill_all()  # else the pipes may stay open
                for number, fd in enumerate(child.outputs):
                    while run.take(number, fd) and not run.over_limit and _is_readable(fd):
                        pass
                if run.over_limit:
                    run.ending, run.status = "output", None
                elif self._scratch_is_full():
                    self._empty_scratch()
                    run.ending, run.status = "scratch", None
                return run

    def _spawn(self, argv, interpreter):
        """A child that runs argv in the scratch directory with nothing but its standard streams."""
        streams = [os.pipe() for _ in range(5 if interpreter else 3)]  # stdin, stdout, stderr, source, replies
        inside = [streams[0][0], streams[1][1], streams[2][1]]
        outside = [streams[0][1], streams[1][0], streams[2][0]]
        if interpreter:
            inside += [streams[3][0], streams[4][1]]
            outside += [streams[3][1], streams[4][0]]
        pid = os.fork()
        if pid == 0:
            self._become(argv, inside)
        for fd in inside:
            os.close(fd)
        self._leader = pid
        return Child(outside)

    def _become(self, argv, streams):
        message = ""
        try:
            os.setpgid(0, 0)
            high = [_duplicate_above(fd, 64) for fd in streams]
            for fd, above in enumerate(high):
                os.dup2(above, fd)
            os.closerange(len(high), 65536)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(self._scratch)
            os.umask(0o022)
            self._limit()
            self._confine()
            environment = {"PATH": self._config["path"], "HOME": self._scratch, "TMPDIR": self._scratch}
            environment.update(LANG="C.UTF-8", PYTHONDONTWRITEBYTECODE="1")
            os.execvpe(argv[0], argv, environment)
        except BaseException as error:  # noqa: BLE001 - a child must not return
            message = f"{argv[0][:200]!r}: {error}\n"
        finally:
            try:
                os.write(2, message.encode("utf-8", "replace"))
            finally:
                os._exit(127)

    def _limit(self):
        limits = self._limits
        for what, value in (
            (resource.RLIMIT_CPU, limits["cpu_s"]),
            (resource.RLIMIT_FSIZE, limits["scratch_bytes"]),
            (resource.RLIMIT_NOFILE, limits["open_files"]),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_NPROC, self._config["nproc"]),
        ):
            if value is not None:
                resource.setrlimit(what, (value, value))

    def _kill_all(self):
        """Ends every process in here but this one, also those that nobody waits for.

        Where this is the first process of a PID namespace or a container, the kernel does it. Elsewhere everything is
        in the leader's process group, which seccomp lets nobody leave, and orphans become this process's children. The
        leader is not reaped before, so its number cannot have become somebody else's.
        """
        if os.getpid() == 1:
            _kill(os.kill, -1)
        elif self._leader is not None:
            _kill(os.killpg, self._leader)
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        self._leader = self._leader_status = self._interpreter = None

    def _scratch_is_full(self):
        """Where no file system of its own limits the scratch directory: whether it holds more than it may."""
        if not self._config["watch_scratch"]:
            return False
        size, count = 0, 0
        for directory, inner, names in os.walk(self._scratch):
            for name in (*inner, *names):
                try:
                    size += os.lstat(os.path.join(directory, name)).st_blocks * 512
                except FileNotFoundError:
                    continue
                count += 1
                if size > self._limits["scratch_bytes"] or count > self._limits["scratch_files"]:
                    return True
        return False

    def _empty_scratch(self):
        """Ends everything, and removes what it wrote: by programs, for Python fails in trees thousands deep."""
        self._kill_all()
        self._spawn(["sh", "-c", "exec 2>/dev/null; chmod -R u+rwX .; rm -rf -- * .[!.]* ..?*"], False)
        os.waitpid(-1, 0)
        self._leader = None

    def _reap(self):
        """Collects dead orphans, and notes how the leader ended."""
        while self._leader_status is None:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None:
                return
            if dead.si_pid == self._leader:
                by_signal = dead.si_code != os.CLD_EXITED
                self._leader_status = -dead.si_status if by_signal else dead.si_status
            else:
                os.waitpid(dead.si_pid, 0)

    def _write(self, request):
        try:
            self._write_all(request["files"])
        except OSError as error:
            return {"refused": error.strerror or "it does not fit"}
        except ValueError:
            return {"refused": "the path is no name of a file"}
        return {}

    def _write_all(self, files):
        for path, content in files.items():
            whole = os.path.join(self._scratch, path)
            os.makedirs(os.path.dirname(whole), exist_ok=True)
            if os.path.lexists(whole):
                os.unlink(whole)
            with open(whole, "xb") as file:
                file.write(base64.b64decode(content))

    def _read(self, request):
        files: dict = {}
        left = self._limits["scratch_bytes"]
        for directory, inner, names in os.walk(self._scratch):
            inner.sort()
            for name in sorted(names):
                whole = os.path.join(directory, name)
                content = _regular_content(whole, left)
                if content is None or len(files) == self._limits["scratch_files"]:
                    continue
                left -= len(content)
                path = os.path.relpath(whole, self._scratch)
                files[path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")] = _text(content)
        return {"files": files}

    def _receive(self):
        (size,) = struct.unpack("!I", _read_whole(self._requests, 4))
        if size > MAX_REQUEST_BYTES:
            raise Gone
        return json.loads(_read_whole(self._requests, size))

    def _send(self, answer):
        body = json.dumps(answer).encode()
        left = memoryview(struct.pack("!I", len(body)) + body)
        while left:
            try:
                left = left[os.write(self._answers, left) :]
            except OSError as error:
                raise Gone from error


class Child:
    """Our ends of a child's pipes."""

    def __init__(self, fds):
        self.outputs = (fds[1], fds[2])
        self.input = fds[0] if len(fds) == 3 else fds[3]
        self.replies = fds[4] if len(fds) == 5 else -1
        self.to_write = b""
        self._fds = fds
        for fd in fds:
            os.set_blocking(fd, False)
        if len(fds) == 5:
            os.close(fds[0])  # code reads an empty stdin
            self._fds = fds[1:]

    def feed(self, events, close_after):
        """Writes what fits of the input; whether there is more."""
        try:
            if events & (select.POLLERR | select.POLLNVAL):
                raise BrokenPipeError
            self.to_write = self.to_write[os.write(self.input, self.to_write[:READ_BYTES]) :]
        except BlockingIOError:
            return True
        except OSError:
            self.to_write = b""
        if not self.to_write and close_after:
            os.close(self.input)
            self._fds.remove(self.input)
        return bool(self.to_write)

    def __del__(self):
        for fd in self._fds:
            os.close(fd)


class Run:
    """What a program has done so far."""

    def __init__(self, output_bytes):
        self._limit = output_bytes
        self._output = (bytearray(), bytearray())
        self.status = None
        self.ending = "exited"
        self.state_lost = False

    def take(self, number, fd):
        """Takes what the stream holds; whether it can hold more."""
        received = _read_ready(fd)
        self._output[number].extend(received or b"")
        return received != b""

    @property
    def over_limit(self):
        """Whether a stream holds more than it may."""
        return max(map(len, self._output)) > self._limit

    def answer(self):
        """As the answer to the request."""
        stdout, stderr = (_text(bytes(output[: self._limit])) for output in self._output)
        return {
            "stdout": stdout,
            "stderr": stderr,
            "status": self.status,
            "ending": self.ending,
            "state_lost": self.state_lost,
        }


def _move_protocol():
    """Takes the protocol's streams away from where children look; (requests, answers)."""
    moved = [_duplicate_above(fd, 64) for fd in (0, 1)]
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    os.close(nothing)
    return moved


def _duplicate_above(fd, least):
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)


def _read_whole(fd, size):
    chunks = []
    while size:
        chunk = os.read(fd, min(size, 1 << 20))
        if not chunk:
            raise Gone
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _read_ready(fd):
    """What can be read at once; None when nothing can, b"" at the end."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _drain(fd):
    while fd >= 0 and _read_ready(fd):
        pass


def _is_readable(fd):
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _kill(kill, pid):
    with contextlib.suppress(ProcessLookupError):
        kill(pid, signal.SIGKILL)


def _regular_content(path, most_bytes):
    """A regular file's bytes; None for anything else, or for more than most_bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode) or state.st_size > most_bytes:
            return None
        content = file.read(most_bytes + 1)
        return content if len(content) <= most_bytes else None


def _text(data):
    return base64.b64encode(data).decode()


def harden():
    """Keeps children from looking into this process, and everybody from gaining rights by a set-user-id program."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option}")


if __name__ == "__main__":
    harden()
    Supervisor(json.loads(sys.argv[1])).serve()
