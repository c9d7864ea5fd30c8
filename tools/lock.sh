#!/bin/sh
# Resolves every lock file anew: the laptop's first, then, held to its versions, one for each image, and the tools'.
# Hashes are in them, so an install takes what was resolved here or nothing. Needs uv.
set -eu
compile() {
    uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-annotate --no-header \
        --no-emit-index-url "$@"
}
image() { # lock file, extras, further requirements
    lock=$1 extras=$(printf -- '--extra %s ' $2)
    shift 2
    # shellcheck disable=SC2086  # one word for each extra
    printf '%s\n' "$@" | compile pyproject.toml - $extras --constraint requirements.lock -o "requirements/$lock.lock"
}

[ "${1:-all}" = images ] || compile pyproject.toml --extra dev -o requirements.lock
compile requirements-k8s.in -o requirements-k8s.lock
mkdir -p requirements
image envs "config environments sandbox traces"
image rollout "rollout traces"
for service in trainer inference; do
    image "$service" "$service traces"
    image "$service-tpu" "$service traces" "jax[tpu]==0.10.2"
    image "$service-cuda" "$service traces" "jax[cuda12]==0.10.2"
done
image env-reasoning-gym reasoning-gym
image env-tau2 tau2 grpcio-tools setuptools pytest pytest-asyncio pytest-timeout
printf 'grpcio-tools\nsetuptools\n' | compile --constraint requirements.lock - -o requirements/build.lock
