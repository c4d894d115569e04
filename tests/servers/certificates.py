"""The certificates of the test servers, made anew for each `tests/services up`.

    ca.pem          signs everything below
    server.pem      for localhost and 127.0.0.1
    localhost.pem   for localhost only: `verify-full` must refuse it under the
                    address 127.0.0.1, where `verify-ca` accepts it
    auth_cert.pem   a client; PostgreSQL's `cert` method wants the role's name
                    as the common name
    wrong-ca.pem    signed nothing

Each NAME.pem has a NAME.key beside it. Kafka's PEM keystores and MongoDB want
both in one file: server-and-key.pem and auth_cert-and-key.pem.
"""

import subprocess
import tempfile
from pathlib import Path

from .failure import Failure

VALID_DAYS = "365"
# PKCS #8 keys of this kind are read by libpq, rustls, OpenSSL and Java alike.
KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
# Made last, hence the sign that all the others are there.
LAST = "auth_cert-and-key.pem"


def make(folder: Path) -> None:
    """Fills `folder`, unless it is filled already."""
    if (folder / LAST).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    _authority(folder, "ca", "outboxd test CA")
    _authority(folder, "wrong-ca", "outboxd test CA that signed nothing")
    _signed(folder, "server", "localhost", "serverAuth", "DNS:localhost,IP:127.0.0.1")
    _signed(folder, "localhost", "localhost", "serverAuth", "DNS:localhost")
    _signed(folder, "auth_cert", "auth_cert", "clientAuth", "DNS:auth_cert")
    for name in ("server", "auth_cert"):
        both = (folder / f"{name}.key").read_text() + (folder / f"{name}.pem").read_text()
        (folder / f"{name}-and-key.pem").write_text(both)
    # In Docker, Kafka runs as a user that owns nothing of ours, and reads its
    # file with the key; the key is worth nothing outside these tests.
    for certificate in folder.glob("*.pem"):
        certificate.chmod(0o644)


def _authority(folder: Path, name: str, common_name: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".cnf") as settings:
        # A settings file of our own: distributions disagree on what theirs adds to a request.
        settings.write(
            "[req]\nprompt=no\ndistinguished_name=name\nx509_extensions=authority\n"
            f"[name]\nCN={common_name}\n"
            "[authority]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\n"
            "subjectKeyIdentifier=hash\n"
        )
        settings.flush()
        _openssl(
            ["req", "-x509", *KEY, "-config", settings.name, "-days", VALID_DAYS]
            + ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
        )


def _signed(folder: Path, name: str, common_name: str, usage: str, alternative_names: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        settings, request = Path(scratch) / "settings.cnf", Path(scratch) / "request.pem"
        settings.write_text(
            f"[req]\nprompt=no\ndistinguished_name=name\n[name]\nCN={common_name}\n"
            f"[leaf]\nbasicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
            f"extendedKeyUsage={usage}\nsubjectAltName={alternative_names}\n"
            "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        )
        _openssl(["req", "-new", *KEY, "-config", settings, "-keyout", folder / f"{name}.key", "-out", request])
        _openssl(
            ["x509", "-req", "-in", request, "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial"]
            + ["-extfile", settings, "-extensions", "leaf", "-days", VALID_DAYS, "-out", folder / f"{name}.pem"]
        )
    # libpq and PostgreSQL refuse a key that others may read.
    (folder / f"{name}.key").chmod(0o600)


def _openssl(arguments: list) -> None:
    try:
        ended = subprocess.run(
            ["openssl", *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise Failure("`openssl` is not there: install it, it makes the test servers' certificates") from error
    if ended.returncode != 0:
        raise Failure(f"`openssl {arguments[0]}` failed:\n{ended.stderr}")
