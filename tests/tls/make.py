"""Made the PEM files in this folder: `pip install cryptography; python tests/tls/make.py`. The tests only read them."""

from __future__ import annotations

from datetime import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HERE = Path(__file__).parent
BEGIN, END = datetime(2020, 1, 1), datetime(2120, 1, 1)
THIS_MACHINE = [x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")]
Key = ec.EllipticCurvePrivateKey


def name_of(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def certificate(file: str, key: Key, issuer: str, issuer_key: Key, *, ca: bool = False, end: datetime = END) -> None:
    builder = (
        x509.CertificateBuilder()
        .subject_name(name_of(file))
        .issuer_name(name_of(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGIN)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if ca:
        use = dict.fromkeys(
            ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
            False,
        )
        use |= {"key_cert_sign": True, "crl_sign": True, "encipher_only": False, "decipher_only": False}
        builder = builder.add_extension(x509.KeyUsage(**use), critical=True)
    else:
        builder = builder.add_extension(x509.SubjectAlternativeName(THIS_MACHINE), critical=False)
    made = builder.sign(issuer_key, hashes.SHA256())
    (HERE / f"{file}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))


def save_key(file: str, key: Key, password: bytes | None = None) -> None:
    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (HERE / f"{file}.key").write_bytes(key.private_bytes(*form, lock))


def main() -> None:
    ca, stranger, server, client = (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))
    certificate("ca", ca, "ca", ca, ca=True)
    certificate("stranger", stranger, "stranger", stranger, ca=True)  # a CA that signed nothing that is trusted
    certificate("server", server, "ca", ca)
    certificate("client", client, "ca", ca)
    certificate("untrusted", server, "stranger", stranger)  # with the key of `server`, as the next one
    certificate("expired", server, "ca", ca, end=datetime(2020, 1, 2))
    save_key("server", server)
    save_key("client", client)
    save_key("encrypted", server, b"secret")


if __name__ == "__main__":
    main()
