"""Certificates for tests: an authority of one's own, and what it signs for 127.0.0.1 and localhost."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace import config

TOKEN = "a-token-that-tests-use"


class Authority:
    """Signs certificates. Its own is at `path`."""

    def __init__(self, folder: Path, name: str = "authority"):
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = _sign(self._name, self._name, self._key, self._key, authority=True)
        self.path = folder / f"{name}.crt"
        self.path.write_bytes(_pem(self._certificate))

    def issue(self, name: str, *hosts: str) -> Issued:
        """A certificate and its key, for 127.0.0.1 and localhost unless other hosts are named."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = _sign(subject, self._name, key, self._key, hosts=hosts or ("127.0.0.1", "localhost"))
        issued = Issued(self._folder / f"{name}.crt", self._folder / f"{name}.key", self.path)
        issued.certificate.write_bytes(_pem(certificate))
        issued.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return issued


class Issued(NamedTuple):
    """Files of a service."""

    certificate: Path
    key: Path
    authority: Path

    def tls(self, *, client_certificates: bool = False) -> config.Tls:
        """As a run file names them."""
        return config.Tls(**self._asdict(), client_certificates=client_certificates)


def token_file(folder: Path, *tokens: str, name: str = "token") -> Path:
    """A file with these tokens, by default TOKEN."""
    path = folder / name
    path.write_text("\n".join(tokens or (TOKEN,)) + "\n")
    return path


def _sign(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    by: ec.EllipticCurvePrivateKey,
    *,
    authority: bool = False,
    hosts: tuple[str, ...] = (),
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
    )
    if authority:
        builder = builder.add_extension(
            x509.KeyUsage(False, False, False, False, False, True, True, False, False), critical=True
        )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return builder.sign(by, hashes.SHA256())


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
