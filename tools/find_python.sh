#!/bin/sh
# Prints the path of a Python 3.12 or 3.13 that runs: from PATH, under pyenv, or through uv. 3.12 comes first: the lock
# file was made for it. Each candidate is started, for a pyenv shim without its version answers only with an error.
set -u

# Without uv a virtual environment needs ensurepip, which Debian packs apart from Python.
needs="sys, venv"
command -v uv >/dev/null 2>&1 || needs="$needs, ensurepip"

works() { # path minor_version
    "$1" -c "import $needs; sys.exit(sys.version_info[:2] != (3, $2))" >/dev/null 2>&1
}

show() { # the interpreter itself, not a shim or a link in somebody's PATH
    "$1" -c 'import sys; print(sys.executable)'
}

for minor in 12 13; do
    for candidate in "python3.$minor" python3 python "${HOME:-}/.pyenv/versions/3.$minor".*/bin/python3; do
        path=$(command -v "$candidate" 2>/dev/null) || continue
        if works "$path" "$minor"; then show "$path" && exit 0; fi
    done
done

if command -v uv >/dev/null 2>&1; then
    for minor in 12 13; do
        path=$(uv python find "3.$minor" 2>/dev/null) && works "$path" "$minor" && show "$path" && exit 0
    done
    uv python install 3.12 >&2 && path=$(uv python find 3.12) && works "$path" 12 && show "$path" && exit 0
fi

echo "Headrace needs Python 3.12 or 3.13 with venv and found none on PATH, under ~/.pyenv/versions or through uv." >&2
echo "Install one (apt-get install python3 python3-venv; pyenv install 3.12; or uv), or name it: make PYTHON=/path/to/python3.12" >&2
exit 1
