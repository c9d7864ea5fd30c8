#!/bin/sh
# Makes the virtual environment $1 with exactly what the lock file $2 lists, hashes checked, and the `headrace` command.
# PYTHON names the interpreter; left empty, tools/find_python.sh finds one.
set -eu
venv=$1
lock=$2
python=${PYTHON:-$(sh tools/find_python.sh)}
echo "Installing into $venv with $("$python" --version) (the first time takes minutes)"

if command -v uv >/dev/null 2>&1; then
    [ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv"
    uv pip install --quiet --python "$venv/bin/python" --require-hashes -r "$lock"
    uv pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
else
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null  # uv makes none
    "$venv/bin/python" -m pip install --quiet --require-hashes -r "$lock"
    "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
fi
