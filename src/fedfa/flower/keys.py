"""Certificates and keys of a federation, by the `cryptography` package, in files that only their owner may read."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedfa.errors import UserError
from fedfa.flower import SILENT
from fedfa.flower.settings import NAME

AUTHORITY_DAYS, SERVER_DAYS = 3650, 825
CONNECTION = "fedfa"
"""The name of the SuperLink's connection in Flower's config."""


def make_keys(folder: Path, sites: Sequence[str], host: str, port: int) -> list[str]:
    """A CA, the server's certificate, a key pair and a config a site; the commands that each party types, as lines."""
    for name in sites:
        if not NAME.fullmatch(name):
            raise UserError(f"{name!r} is no name for a site: letters, digits, '.', '_' and '-'")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: keys are never overwritten")
    for place in (folder, folder / "server", folder / "sites", *(folder / "sites" / name for name in sites)):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    authority = _authority(authority_key)
    certificate = authority.public_bytes(serialization.Encoding.PEM)
    _write(folder / "ca.key", _pem(authority_key))
    server = folder / "server"
    _write(server / "ca.pem", certificate, 0o644)
    _write(server / "server.key", _pem(server_key))
    _write(
        server / "server.pem",
        _server(server_key, authority, authority_key, host).public_bytes(serialization.Encoding.PEM),
        0o644,
    )
    # Controls are for the server itself alone.
    connection = {"address": f"127.0.0.1:{port}", "root-certificates": str((server / "ca.pem").absolute())}
    config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    (server / "flower").mkdir(mode=0o700)
    _write(server / "flower" / "config.toml", tomli_w.dumps(config).encode())
    for name in sites:
        _site(folder / "sites" / name, name, f"{host}:{port}", certificate)
    return instructions(folder, sites, port)


def instructions(folder: Path, sites: Sequence[str], port: int) -> list[str]:
    """What the parties of a federation type, in its order."""
    server = folder / "server"
    quiet = " ".join(f"{name}={value}" for name, value in SILENT.items())
    return [
        f"Keep {folder / 'ca.key'} off line: whoever has it can pose as the server.",
        "",
        "At the server, once and for as long as the federation lives:",
        "  " + " ".join(["fedfa flower server", str(server), "--host 0.0.0.0", f"--port {port}"]),
        "At the server, in the shell where runs are started, and then once a site:",
        f"  export FLWR_HOME={(server / 'flower').absolute()} {quiet}",
        *(f"  flwr supernode register {folder / 'sites' / name / 'site.pub'} --name {name}" for name in sites),
        "At a site, after its folder has been brought there by a safe way and its site.toml says where the data are:",
        *(f"  fedfa flower site {folder / 'sites' / name}" for name in sites),
        "At the server, for every run of the app that `fedfa flower new` makes:",
        "  flwr run APP --stream",
    ]


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedfa federation CA")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    return (
        _certificate(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _server(
    key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, host: str
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedfa federation server")])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    # The ServerApp, on the same machine, comes by 127.0.0.1.
    hosts = dict.fromkeys((host, "localhost", "127.0.0.1"))
    return (
        _certificate(name, authority.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(one) for one in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    start = datetime.now(UTC) - timedelta(hours=1)  # clocks differ
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _site(folder: Path, name: str, superlink: str, certificate: bytes) -> None:
    """A site's folder: its key pair, the CA's certificate, and a config to be filled in."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write(folder / "site.key", _pem(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(folder / "site.pub", public + b"\n", 0o644)
    _write(folder / "ca.pem", certificate, 0o644)
    _write(folder / "site.toml", SITE.format(name=name, superlink=superlink).encode())


SITE = """\
# A site of a federation: `fedfa flower site` reads this. Nothing in here goes to the server but the name.
name = "{name}"
superlink = "{superlink}"
# source = "image_folders"        # what reads the data (`fedfa list`); the experiment's if nothing is said
# path = "/data/images"           # the folder that it reads
# client = "{name}"               # which of its clients this site is, if it has several
# device = "cuda"                 # the experiment's if nothing is said
# agreed = "experiment.toml"      # any other experiment is refused
# [settings]                      # settings of the source
# size = 256
"""


def _pem(
    key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """A new file that never was readable for more than it may be."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
