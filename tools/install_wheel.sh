#!/bin/sh
# Unpacks the wheels that the lock file $2 lists into the folder $3, hashes checked, without what they depend on; $1 is
# the virtual environment whose pip does it when there is no uv.
set -eu
rm -rf "$3"
if command -v uv >/dev/null 2>&1; then
    uv pip install --quiet --python "$1/bin/python" --target "$3" --no-deps --require-hashes -r "$2"
else
    "$1/bin/python" -m pip install --quiet --target "$3" --no-deps --require-hashes -r "$2"
fi
