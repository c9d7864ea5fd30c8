#!/bin/sh
# Installs the system's Node.js, for the TypeScript example's tests, when nothing stands in the way: there is none yet,
# we are root, and there is apt. Otherwise it does nothing, and those tests say that they are skipped.
set -eu
if command -v node >/dev/null 2>&1 && command -v npm >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "Node.js is not installed; the TypeScript example is not tested"
    exit 0
fi
if apt-get update -qq && apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null; then
    echo "Installed Node.js $(node --version)"
else
    echo "Node.js cannot be installed; the TypeScript example is not tested"
fi
