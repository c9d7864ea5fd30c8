#!/bin/sh
# Installs the packages of the environment reasoning_gym into the virtual environment $1, for its tests. One of them is
# compiled on the way; where there is no C compiler, those tests say that they are skipped.
set -eu
python=$1/bin/python
lock=requirements/env-reasoning-gym.lock
if "$python" -c "import reasoning_gym" >/dev/null 2>&1; then exit 0; fi
if command -v uv >/dev/null 2>&1; then
    install="uv pip install --quiet --python $python"
else
    install="$python -m pip install --quiet"
fi
if $install --require-hashes -r "$lock"; then
    echo "Installed reasoning_gym"
else
    echo "reasoning_gym cannot be installed; its environment is not tested"
fi
