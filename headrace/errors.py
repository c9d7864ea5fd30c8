"""What ends a process at start: somebody outside it got something wrong, and one line can say what to do."""


class StartupError(Exception):
    """Something outside the process is unusable; the message says what, and what to do about it. Exit code 2."""


class AddressInUse(StartupError):
    """The address to listen on is taken, or not this machine's."""
