"""The codes of errors: each error has one, each code has a page, and all of them are found in one list."""

import ast
import pickle
import re
import traceback
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from inbox.by_key.failure import described
from inbox.worker.connecting import reason
from mailroom import errors
from mailroom.cli.commands.explain import PAGES, sections
from mailroom.doctor.kinds import KINDS
from mailroom.errors import Coded, ConfigurationError, DecodeError, InvalidName, LinkRefused, MailroomError, coded
from mailroom.errors.codes import CODES
from mailroom.session.repeats import cause
from tests.error_index import INDEX, index
from tests.support.command import done, error_of, mailroom
from tests.support.source import parsed

ROOT = Path(__file__).parents[1]
PACKAGES = ("mailroom", "outbox", "inbox", "dispatcher", "spark_jobs", "benchmarks", "examples")
LIST = ROOT / "mailroom" / "errors" / "codes.py"


@cache  # not when the module is imported, which each test process does
def trees(having: str = "") -> dict[Path, ast.Module]:
    """All modules but the list of the codes, or those whose text has this: to parse all takes seconds."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if path != LIST]
    return dict(parsed(files, having))


def name_of(node: ast.expr) -> str:
    """The last part of a name with points."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def classes() -> dict[str, str | None]:
    """The names of all classes of errors with a code, and the code of those that have one of their own."""
    found: dict[str, str | None] = {"Coded": None}
    defined = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while new := [
        node for node in defined if node.name not in found and {name_of(base) for base in node.bases} & set(found)
    ]:
        for node in new:
            own = [
                each.value for each in node.body if isinstance(each, ast.Assign) and name_of(each.targets[0]) == "code"
            ]
            inherited = [found[name] for base in node.bases if (name := name_of(base)) in found]
            found[node.name] = ast.literal_eval(own[0]) if own else next(filter(None, inherited), None)
    return found


def made() -> Iterator[tuple[str, ast.Call]]:
    """Every place where such an error is made, and the name of its class."""
    known = classes()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := name_of(node.func)) in known:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {name}", node


@pytest.mark.slow
def test_every_error_is_made_with_a_code() -> None:
    places = dict(made())
    assert len(places) > 300
    without = [
        place
        for place, call in places.items()
        if classes()[place.split()[-1]] is None and "code" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not without


def test_an_error_that_is_told_as_another_one_hands_its_code_on() -> None:
    retold = [
        node
        for tree in trees("type(error)(").values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc is not None and ast.unparse(node.exc).startswith("type(error)(")
    ]
    assert len(retold) == 3
    assert all("code=error.code" in ast.unparse(node) for node in retold)


@pytest.mark.slow
def test_the_code_names_what_the_list_has_and_the_list_has_nothing_else() -> None:
    texts = {
        node.value
        for tree in trees("MR-").values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"MR-[\w-]+", node.value)
    }
    assert texts == set(CODES)


def test_codes_are_short_words_in_order() -> None:
    assert list(CODES) == sorted(CODES)
    for code, summary in CODES.items():
        assert re.fullmatch(r"MR(-[a-z]+)+", code)
        assert len(code) <= 40
        assert summary.endswith(".")


def test_each_code_stands_on_a_page_that_says_what_it_means_why_and_what_to_do() -> None:
    titles = [
        title for page in PAGES.glob("*.md") for title in re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(titles) == list(CODES)
    assert len(list(PAGES.iterdir())) <= 15
    for code, summary in CODES.items():
        meaning, why, reason, *rest = sections()[code].text.split("\n\n")
        assert (" ".join(meaning.split()), why) == (summary, "**Why**"), code
        assert reason
        assert "**What to do**" in rest[:-1]


def test_the_index_is_up_to_date() -> None:
    assert INDEX.read_text() == index(), "run: python -m tests.error_index"


def test_a_code_must_be_given_and_known() -> None:
    with pytest.raises(TypeError, match="a MailroomError needs a code"):
        MailroomError("It broke.")
    with pytest.raises(TypeError, match="not 'MR-nothing-like-it'"):
        ConfigurationError("It broke.", code="MR-nothing-like-it")


def test_a_class_with_one_situation_has_its_code() -> None:
    assert InvalidName.code == InvalidName("No.").code == "MR-invalid-name"


def test_the_text_lacks_the_code_and_the_traceback_ends_with_it() -> None:
    error = MailroomError("It broke.", code="MR-inbox-in-use")
    assert str(error) == "It broke."
    assert coded(str(error), error) == "It broke. [MR-inbox-in-use]"
    assert coded("ValueError", ValueError()) == "ValueError"
    assert traceback.format_exception_only(error)[-1] == "MR-inbox-in-use: see `mailroom explain MR-inbox-in-use`\n"


def test_a_failed_attempt_is_recorded_with_the_code() -> None:
    error = DecodeError("It is not a map.")
    assert described(error) == "DecodeError [MR-value-unreadable]: It is not a map."
    assert described(ValueError("no")) == "ValueError: no"


def test_a_log_line_tells_the_code() -> None:
    error = MailroomError("It broke.", code="MR-inbox-in-use")
    assert cause(error) == reason(error) == "It broke. [MR-inbox-in-use]"
    assert cause(ValueError("no")) == "ValueError"


def subclasses(of: type[Coded]) -> Iterator[type[Coded]]:
    for each in of.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_class_is_pickled_with_its_code() -> None:
    for package in ("inbox", "outbox", "dispatcher", "mailroom.sql.runner", "mailroom.testing.stepping"):
        import_module(package)
    checked = 0
    for kind in subclasses(Coded):
        error = kind.__new__(kind)
        Coded.__init__(error, "It broke.", "elsewhere", code="MR-link-cut")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (again.args, again.code) == (("It broke.", "elsewhere"), "MR-link-cut")
        assert again.__notes__ == error.__notes__
        checked += 1
    assert checked > len(errors.__all__)


def test_a_pickled_error_keeps_what_its_constructor_was_given() -> None:
    error = LinkRefused("no", "paris", "mailroom migrate", code="MR-link-no-schema")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.at, again.command) == ("paris", "mailroom migrate")


# -- The command ------------------------------------------------------------------------------------------------------


def test_the_command_shows_the_code_of_an_error_behind_its_text(dsn: str) -> None:
    ran = mailroom("inbox", "peek", "nothing-like-it", dsn=dsn)
    assert ran.stderr.rstrip().endswith("[MR-invalid-name]. See: mailroom inbox peek --help")
    ran = mailroom("dead-letter", "show", "1", dsn=dsn)
    assert ran.stderr.rstrip().endswith("[MR-no-dead-letter]")
    error_of(ran)


def test_explain_prints_what_the_page_says_of_a_code_without_links_to_pages() -> None:
    assert done("explain", "MR-inbox-in-use", dsn="") == f"# MR-inbox-in-use\n\n{sections()['MR-inbox-in-use'].text}\n"
    linking = next(
        code for code, section in sections().items() if "[total order](../guides/total-order.md)" in section.text
    )
    printed = done("explain", linking, dsn="")
    assert "total order." in printed
    assert "](" not in printed


def test_explain_lists_all_codes() -> None:
    listed = done("explain", dsn="").splitlines()
    assert [line.split()[0] for line in listed] == [*CODES, *KINDS]


def test_explain_of_no_code_names_those_that_are_near() -> None:
    ran = mailroom("explain", "MR-inbox-in-us")
    assert ran.exit_code == 2
    assert "There is no code MR-inbox-in-us. Did you mean MR-inbox-in-use" in ran.stderr
    assert "See: mailroom explain" in ran.stderr


def test_no_text_names_a_page_that_an_installed_package_has_not() -> None:
    """Nor does a docstring, which `help` shows; `docs/errors` is in the package."""
    printed = {
        f"{path.relative_to(ROOT)}: {node.value}"
        for path, tree in trees("docs/").items()
        if path.relative_to(ROOT).parts[0] not in ("benchmarks", "examples")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(r"docs/(?!errors\b)", node.value)
    }
    assert printed == set()
    assert "docs/" not in (ROOT / "docs" / "reference" / "cli.md").read_text()
