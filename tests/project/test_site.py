"""The site of docs/: each page stands in its navigation, and what is wrong fails its build, with either builder."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import search, site
from tests.project.test_docs import blocks
from tests.project.test_front_door import commands_of
from tests.site import Read, broken, listed, loaded_from_elsewhere, read
from tests.support.browser import browser, needs_browser, serving
from tests.support.pages import DECISIONS, DOCS, ROOT, page_named
from tests.support.waiting import WITHIN_S, eventually

CONFIG = (ROOT / "mkdocs.yml").read_text()
SETTINGS: dict[str, Any] = yaml.safe_load(CONFIG)
needs_site = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("zensical", "mkdocs", "mkdocstrings_handlers"))),
    reason="the site's packages are not installed: pip install 'pg-mailroom[docs]'",
)


def leaves(nav: object) -> list[str]:
    """Return the pages of a navigation."""
    if isinstance(nav, dict):
        return [page for each in nav.values() for page in leaves(each)]
    return [page for each in nav for page in leaves(each)] if isinstance(nav, list) else [str(nav)]


def test_every_page_is_in_the_navigation_once_but_for_those_of_errors() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert SETTINGS["not_in_nav"] == "/errors/\n"
    shown = Counter(leaves(SETTINGS["nav"]))
    assert set(shown) == {page for page in pages if not page.startswith("errors/")}
    assert {page for page, times in shown.items() if times > 1} == set()


def test_names_of_pages_are_unique() -> None:
    names = Counter(path.name for path in DOCS.rglob("*.md") if path.parent != DECISIONS)
    assert {name for name, times in names.items() if times > 1} == set()


def test_pages_lead_to_no_file_outside_of_the_site() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\((?![a-z]+:)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).resolve().is_relative_to(DOCS), f"{page.name}: {target}"


def test_the_reference_renders_each_module_that_is_listed() -> None:
    rendered = [
        module
        for page in DOCS.rglob("api-*.md")
        for module in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(rendered) == sorted(listed())


def test_the_readme_and_the_first_page_have_one_first_program() -> None:
    [there], [here] = (
        [block.text for block in blocks(page) if block.saved_as]
        for page in (ROOT / "README.md", page_named("no-server.md"))
    )
    assert there == here


def test_the_build_is_strict_and_clean_and_its_result_is_checked() -> None:
    build, order, check = commands_of("docs")
    assert build.split()[1:] == ["build", "--clean", "--strict"], "with -q it would exit 0 on what is wrong"
    assert (order.split()[1:], check.split()[1:]) == (["-m", "tests.search"], ["-m", "tests.site"])
    assert SETTINGS["theme"]["font"] is False


def test_what_is_loaded_from_elsewhere_or_leads_nowhere_is_found(tmp_path: Path) -> None:
    here = tmp_path / "a.html"
    here.write_text("")
    page = Read(
        '<script src="https://cdn.example/x.js"></script><img src="//cdn.example/x.png"><link href="a.css">'
        '<a href="https://example.org"></a><a href="a.html#there"></a><a href="#not"></a>'
        '<a href="b.html"></a><p id="there">'
    )
    assert list(loaded_from_elsewhere({here: page})) == [
        "a.html loads //cdn.example/x.png",
        "a.html loads https://cdn.example/x.js",
    ]
    assert list(broken({here: page})) == ["a.html leads to #not", "a.html leads to a.css", "a.html leads to b.html"]


def test_blocks_whose_copy_no_shell_would_take_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text("```console\n$ mailroom status\n7 rows\n```\n")
    built_as = {
        True: '<code><span class="gp">$ </span>mailroom<span> </span>status\n<span class="go">7 rows</span></code>',
        False: '<code><span class="gp">$ </span>mailroom<span> </span>status\n7 rows</code>',
    }
    for is_right, text in built_as.items():
        (tmp_path / "page.html").write_text(text)
        assert (list(site.ill_copied(tmp_path)) == []) is is_right


def test_words_lead_to_pages_that_exist() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(SETTINGS["extra"]["search_words"]) <= pages
    assert {f"{page}.md" for page in search.QUERIES.values()} <= {Path(page).name for page in pages}


def item(location: str, title: str, text: str = "", *kinds: str) -> dict[str, Any]:
    """Return what zensical says of a heading."""
    title = " ".join([title, *(f"<small><code>{kind}</code></small>" for kind in kinds)])
    return {"location": location, "level": 4 if kinds else 3, "title": title, "text": text, "path": [], "tags": []}


@needs_site
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js here, in which the site's search runs")
def test_the_search_shows_guides_before_attributes_and_loses_none(tmp_path: Path) -> None:
    of_a_class = "reference/api-inbox.html#inbox.Retry"
    given = [
        item("errors/errors-inboxes.html#mr-invalid-cron", "MR-invalid-cron"),
        item(of_a_class, "Retry"),
        item(f"{of_a_class}.cron", "cron", "what <b>mends</b>", "instance-attribute"),
        item("guides/consuming.html#retry", "What to do: Retry"),
        {**item("guides/periodic.html", "Periodic messages"), "level": 1},
    ]
    [worker] = Path(str(importlib.util.find_spec("zensical").origin)).parent.glob(f"templates/{search.WORKER}")  # type: ignore[union-attr]
    (found := tmp_path / search.INDEX).write_text(
        json.dumps(
            {
                "config": {"lang": ["en"], "separator": r"[\s\-_.()]+"},
                "items": search.weighed(given, {"guides/periodic.html": "cron"}),
            }
        )
    )
    assert search.answers(found, worker, ["cron", "mends", "retry"]) == {
        "cron": ["guides/periodic.html", "errors/errors-inboxes.html#mr-invalid-cron", of_a_class],
        "mends": [of_a_class],
        "retry": ["guides/consuming.html#retry", of_a_class],
    }
    (tmp_path / search.WORKER).parent.mkdir(parents=True)
    shutil.copy(worker, (tmp_path / search.WORKER).parent)
    assert len(list(search.unfound(tmp_path, {"cron": "periodic", "retry": "sending"}))) == 1


def built(directory: Path, builder: str, **pages: str) -> tuple[int, str]:
    """Build a site of a few pages with our settings."""
    settings = CONFIG.partition("\nnav:\n")[0].replace("paths: [.]", f"paths: [{ROOT}]")
    settings = settings.replace("tests/api_reference.py", str(ROOT / "tests" / "api_reference.py"))
    nav = [f"{name}.md" for name in pages]
    (directory / "mkdocs.yml").write_text(f"{settings}\n{yaml.safe_dump({'nav': nav})}")
    shutil.copytree(DOCS / "assets", directory / "docs" / "assets")
    for name, text in pages.items():
        (directory / "docs" / f"{name}.md").write_text(text)
    command = [sys.executable, "-m", builder, *commands_of("docs")[0].split()[1:]]
    command += ["--theme", "mkdocs"] if builder == "mkdocs" else []
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False, timeout=4 * WITHIN_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


# `make docs` builds by the first.
builders = pytest.mark.parametrize("builder", ["zensical", pytest.param("mkdocs", marks=pytest.mark.nightly)])
INDEX = "# Page\n\n- [ ] [there](#there)\n\n## There\n"


@pytest.mark.nightly  # `make lint` builds it too
@needs_site
@pytest.mark.slow
@builders
def test_either_builds_it_and_what_it_builds_is_whole(builder: str, tmp_path: Path) -> None:
    # It is made of an operation: our extension puts it there.
    index = f"{INDEX}\n[it](api.md#mailroom.node.identity.node_moved)\n"
    code, said = built(tmp_path, builder, index=index, api="# Node\n\n::: mailroom.node.identity\n")
    assert code == 0, said
    pages = read(tmp_path / "site")
    assert list(broken(pages)) == []
    assert {path.name for path in pages} >= {"index.html", "api.html"}
    if builder == "zensical":  # whose theme readers are given
        assert list(loaded_from_elsewhere(pages)) == []


@pytest.mark.slow
@needs_site
@builders
def test_a_link_that_leads_nowhere_fails_the_build(builder: str, tmp_path: Path) -> None:
    for number, (wrong, expected) in enumerate((("", 0), ("[it](nowhere.md)", 1), ("[it](#nowhere)", 1))):
        (directory := tmp_path / str(number)).mkdir()
        code, said = built(directory, builder, index=f"{INDEX}\n{wrong}\n")
        assert code == expected, said


SHELL = """# Page

```console
$ mailroom status \\
    --json
{}
$ mailroom doctor
```
"""


@needs_site
@needs_browser
@pytest.mark.slow
def test_the_button_of_a_block_copies_its_commands_alone(tmp_path: Path) -> None:
    code, said = built(tmp_path, "zensical", index=SHELL)
    assert code == 0, said
    with serving(tmp_path / "site") as address, browser(tmp_path / "chromium") as window:
        window.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"], "origin": address})
        window.get(f"{address}/index.html")
        eventually(lambda: window.find_elements("css selector", "button[data-md-type=copy], .md-code__button"))
        window.find_element("css selector", "button[data-md-type=copy], .md-code__button").click()
        copied = eventually(lambda: window.execute_script("return navigator.clipboard.readText()"))
    assert copied.split("\n") == ["mailroom status \\", "    --json", "", "mailroom doctor"]


@needs_site
@needs_browser
@pytest.mark.slow
def test_the_picture_is_seen_whole_on_a_phone_and_on_a_screen_in_both_themes(tmp_path: Path) -> None:
    [picture] = re.findall(r"^!\[.*", page_named("index.md").read_text(), re.MULTILINE)
    code, said = built(tmp_path, "zensical", index=f"# Page\n\n{picture}\n")
    assert code == 0, said
    schemes = {"light": "default", "dark": "slate"}
    seen: dict[str, set[bytes]] = {"light": set(), "dark": set()}
    with serving(tmp_path / "site") as address, browser(tmp_path / "chromium") as window:
        for width in (390, 1400):
            metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
            window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            for theme, shown in seen.items():
                feature = {"name": "prefers-color-scheme", "value": theme}
                window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
                window.get(f"{address}/index.html")
                window.execute_script("localStorage.clear()")  # the theme of the first visit is kept there
                window.refresh()
                themed = f"body[data-md-color-scheme={schemes[theme]}]"
                eventually(partial(window.find_elements, "css selector", themed))
                image = window.find_element("css selector", "article img")
                eventually(partial(image.get_property, "naturalWidth"))
                box = image.rect
                assert 300 <= box["width"] <= box["x"] + box["width"] <= width
                assert window.execute_script("return document.documentElement.scrollWidth") <= width
                shown.add(image.screenshot_as_png)
        icon = window.find_element("css selector", "link[rel=icon]").get_attribute("href")
    assert icon == f"{address}/assets/icon.svg"
    assert not seen["light"] & seen["dark"], "the picture has colours for each theme"


@needs_site
def test_an_async_form_and_its_sync_form_lead_to_each_other() -> None:
    griffe = pytest.importorskip("griffe")
    made = griffe.load_extensions(str(ROOT / "tests" / "api_reference.py"))
    package = griffe.load("outbox", search_paths=[ROOT], extensions=made)
    for name, link in {
        "AsyncOutbox.cancel": "See [`Outbox.cancel`][outbox.Outbox.cancel].",
        "AsyncOutbox": "[`Outbox`][outbox.Outbox]",
        "Outbox": "[`AsyncOutbox`][outbox.AsyncOutbox]",
    }.items():
        assert link in package[name].docstring.value
