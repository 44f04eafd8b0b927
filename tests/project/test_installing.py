"""What installs the environments takes uv where pip is configured to go."""

from pathlib import Path

from tests.support.installing import uv_variables

CONFIGURATION = """\
:env:.cert='/etc/ours.crt'
:env:.disable-pip-version-check='1'
global.cert='/etc/others.crt'
global.index-url='https://mirror/simple'
global.extra-index-url='\\nhttps://a/simple\\nhttps://b/simple'
global.find-links='{here} /nowhere https://c/wheels'
install.index-url='https://nearer/simple'
"""


def test_settings_of_pip_are_uv_s(tmp_path: Path) -> None:
    found = uv_variables(CONFIGURATION.format(here=tmp_path), {})
    assert found == {
        "SSL_CERT_FILE": "/etc/ours.crt",
        "UV_DEFAULT_INDEX": "https://nearer/simple",
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": f"{tmp_path},https://c/wheels",
    }


def test_what_is_set_for_uv_stays() -> None:
    assert uv_variables("global.index-url='https://mirror/simple'\n", {"UV_DEFAULT_INDEX": "https://mine"}) == {}
    assert uv_variables("", {}) == {}
