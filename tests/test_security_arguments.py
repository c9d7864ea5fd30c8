"""headrace.security_arguments: flags in place of section security of a run file."""

import argparse

import pytest

from headrace import security_arguments
from headrace.errors import StartupError
from headrace.security import PLAIN
from tests.certificates import TOKEN, Authority, token_file


def read(*arguments: object, serves: bool):
    parser = argparse.ArgumentParser()
    security_arguments.add(parser, serves=serves)
    return security_arguments.read(parser.parse_args(list(map(str, arguments))), serves=serves)


@pytest.mark.parametrize("serves", [True, False])
def test_no_flag_is_plaintext(serves):
    assert read(serves=serves) == PLAIN


def test_a_server_shows_its_certificate_and_asks_for_one_of_an_authority(tmp_path):
    issued = Authority(tmp_path).issue("server")
    flags = ["--tls-certificate", issued.certificate, "--tls-key", issued.key, "--token-file", token_file(tmp_path)]
    shown = read(*flags, serves=True)
    assert shown.tokens == (TOKEN,) and shown.tls.certificate == issued.certificate.read_bytes()
    assert not shown.tls.client_certificates
    assert read(*flags, "--tls-authority", issued.authority, serves=True).tls.client_certificates


def test_a_caller_needs_no_certificate(tmp_path):
    authority = Authority(tmp_path).path
    trusting = read("--tls-authority", authority, "--token-file", token_file(tmp_path), serves=False)
    assert trusting.tls.authority == authority.read_bytes() and trusting.tls.certificate == b""
    assert trusting.authorization == f"Bearer {TOKEN}" and trusting.client_context() is not None
    assert read("--tls", serves=False).channel_credentials() is not None


@pytest.mark.parametrize(
    ("flags", "serves", "says"),
    [
        (["--tls-certificate", "a"], True, "belong together"),
        (["--tls-key", "a"], False, "belong together"),
        (["--tls-authority", "a"], True, "give --tls-certificate and --tls-key"),
        (["--token-file", "a"], True, "plaintext is no secret: give --tls-certificate"),
        (["--token-file", "a"], False, "plaintext is no secret: give --tls-authority"),
        (["--tls-authority", "/nowhere"], False, "/nowhere cannot be read"),
        (["--tls-certificate", "/nowhere", "--tls-key", "/nowhere"], True, "/nowhere cannot be read"),
    ],
)
def test_flags_that_do_not_fit_are_said(flags, serves, says):
    with pytest.raises(StartupError, match=says):
        read(*flags, serves=serves)
