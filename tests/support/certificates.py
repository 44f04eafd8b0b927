"""Certificates of a test's own, made by openssl."""

import subprocess
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """An authority named `name`, whose certificate is `ca`. What it makes are PEM files in `directory`."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.ca, self._ca_key = directory / f"{name}.pem", directory / f"{name}.key"
        self._run("req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", self._ca_key, "-out", self.ca)

    def certificate(self, host: str) -> tuple[Path, Path]:
        """Return a certificate for this host, a name or an address, and its key."""
        request, names, made, key = (self._directory / f"{host}.{end}" for end in ("csr", "ext", "pem", "key"))
        kind = "IP" if host.replace(".", "").isdecimal() else "DNS"
        names.write_text(f"subjectAltName={kind}:{host}\n")
        self._run("req", *_KEY, "-subj", f"/CN={host}", "-keyout", key, "-out", request)
        self._run("x509", "-req", "-in", request, "-extfile", names, "-CA", self.ca, "-CAkey", self._ca_key,
                  "-CAcreateserial", "-days", "2", "-out", made)  # fmt: skip
        return made, key

    def _run(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
