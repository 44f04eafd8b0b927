"""An Apache Kafka with TLS, logins and rights: what a cluster is that others run."""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.kafka import Kafka, properties
from tests.support.port import free_port
from tests.support.waiting import WITHIN_S

if TYPE_CHECKING:
    from confluent_kafka.admin._acl import AclBinding

USER, PASSWORD = "mailroom", "sesame-opens"


class SecureKafka(Kafka):
    """A server that gives nobody a right, except by its listener without TLS, which is `client` and its `admin`.

    `secured` takes a login of USER by SCRAM over TLS; `misnamed` does, too, and shows the certificate of another host.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        secured, misnamed = free_port(), free_port()
        self.secured, self.misnamed = f"localhost:{secured}", f"localhost:{misnamed}"
        self.authority = directory / "ca.pem"
        self.other_authority = directory / "other-ca.pem"
        _make_authority(self.authority)
        _make_authority(self.other_authority)
        text = self._settings.read_text()
        settings = dict(line.split("=", 1) for line in text.splitlines())
        protocols = {"SECURED": "SASL_SSL", "MISNAMED": "SASL_SSL"}
        for name, port, host in (("SECURED", secured, "localhost"), ("MISNAMED", misnamed, "elsewhere.example")):
            _make_certificate(self.authority, directory / f"{host}.pem", host)
            settings["listeners"] += f",{name}://127.0.0.1:{port}"
            settings["advertised.listeners"] += f",{name}://localhost:{port}"
            settings["listener.security.protocol.map"] += f",{name}:{protocols[name]}"
            prefix = f"listener.name.{name.lower()}"
            settings[f"{prefix}.ssl.keystore.type"] = "PEM"
            settings[f"{prefix}.ssl.keystore.location"] = str(directory / f"{host}.pem")
            settings[f"{prefix}.sasl.enabled.mechanisms"] = "SCRAM-SHA-512"
            settings[f"{prefix}.scram-sha-512.sasl.jaas.config"] = (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            )
        settings["authorizer.class.name"] = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        settings["super.users"] = "User:ANONYMOUS"
        self._settings.write_text(properties(settings))

    def start(self) -> None:
        """Start it, and let the user in."""
        from confluent_kafka.admin._scram import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

        super().start()
        mechanism = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4_096)
        wanted = UserScramCredentialUpsertion(USER, mechanism, PASSWORD.encode())
        [made] = self.admin.alter_user_scram_credentials([wanted]).values()
        made.result(WITHIN_S)

    @property
    def login(self) -> dict[str, str]:
        """The options of a client of `secured`, but for its address."""
        return {
            "security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512", "sasl.username": USER,
            "sasl.password": PASSWORD, "ssl.ca.location": str(self.authority),
        }  # fmt: skip

    def grant(self, *rights: str) -> None:
        """Give USER rights such as "Write Topic shop.orders" or "Read Group mailroom.*"."""
        for made in self.admin.create_acls([_acl(right) for right in rights]).values():
            made.result(WITHIN_S)

    def revoke_all(self) -> None:
        """Take all rights from USER."""
        from confluent_kafka.admin._acl import AclBindingFilter, AclOperation, AclPermissionType
        from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

        every = AclBindingFilter(
            ResourceType.ANY, None, ResourcePatternType.ANY, f"User:{USER}", None, AclOperation.ANY,  # type: ignore[arg-type]  # None is any
            AclPermissionType.ANY,
        )  # fmt: skip
        for gone in self.admin.delete_acls([every]).values():
            gone.result(WITHIN_S)


def _acl(right: str) -> "AclBinding":
    from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
    from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

    operation, kind, name = right.split()
    kinds = {
        "Topic": ResourceType.TOPIC, "Group": ResourceType.GROUP, "Cluster": ResourceType.BROKER,
        "TransactionalId": ResourceType.TRANSACTIONAL_ID,
    }  # fmt: skip
    is_prefix = name.endswith("*")
    pattern = ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL
    return AclBinding(
        kinds[kind], name.removesuffix("*"), pattern, f"User:{USER}", "*",
        getattr(AclOperation, operation.upper()), AclPermissionType.ALLOW,
    )  # fmt: skip


def _make_authority(certificate: Path) -> None:
    """Make an authority: a certificate, and its key beside it."""
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj",
        f"/CN={certificate.stem}", "-keyout", certificate.with_suffix(".key"), "-out", certificate,
    )  # fmt: skip


def _make_certificate(authority: Path, both: Path, host: str) -> None:
    """Make a host's key and certificate in one file, as Kafka wants them."""
    key, request, names = (both.with_suffix(suffix) for suffix in (".key", ".request", ".names"))
    names.write_text(f"subjectAltName=DNS:{host}")
    _openssl(
        "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={host}",
        "-keyout", key, "-out", request,
    )  # fmt: skip
    _openssl(
        "x509", "-req", "-days", "2", "-in", request, "-CA", authority, "-CAkey", authority.with_suffix(".key"),
        "-CAcreateserial", "-extfile", names, "-out", both,
    )  # fmt: skip
    both.write_text(key.read_text() + both.read_text())


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=WITHIN_S)
