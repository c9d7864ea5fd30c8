"""Section `security`: TLS and tokens between the services of a run."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from headrace.config.section import Section


class Tls(Section):
    """Certificates: each service reads files of its own at these paths."""

    certificate: Path = Field(description="PEM file: the service's certificate and those between it and the authority")
    key: Path = Field(description="PEM file: the certificate's key, without a password")
    authority: Path | None = Field(
        None, description="PEM file: who signs the services' certificates; empty: the system's authorities"
    )
    client_certificates: bool = Field(False, description="gRPC servers ask callers for a certificate of the authority")

    @model_validator(mode="after")
    def _knows_whom_to_ask(self) -> Tls:
        if self.client_certificates and self.authority is None:
            raise ValueError("client_certificates needs an authority to check them by; set it")
        return self


class Security(Section):
    """What services show each other. Without it: plaintext, and whoever reaches a port may call."""

    tls: Tls | None = None
    token_file: Path | None = Field(
        None, description="file with the token, one a line, that trainer, gateways and engines ask of their callers"
    )
