#!/bin/sh
# Lays in folder $1 what the chart's tests need beside the project: helm, helm3 and kubectl in bin, the schemas of
# Kubernetes releases in venv. PYTHON names the interpreter; left empty, tools/find_python.sh finds one.
set -eu
folder=$1
lock=requirements-k8s.lock
python=${PYTHON:-$(sh tools/find_python.sh)}

if command -v uv >/dev/null 2>&1; then
    [ -x "$folder/venv/bin/python" ] || uv venv --quiet --python "$python" "$folder/venv"
    uv pip install --quiet --python "$folder/venv/bin/python" --require-hashes -r "$lock"
else
    [ -x "$folder/venv/bin/python" ] || "$python" -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet --require-hashes -r "$lock"
fi
"$folder/venv/bin/python" -m tools.get_helm "$folder/bin"
