"""One test of a whole list, which costs one set-up and tells all that is wrong with the list, not the first of it."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., None]


def listed(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Call the test with each of the cases, as `pytest.mark.parametrize` does, but within one test.

    Its other arguments are fixtures, which all cases share: none may be in the way of the next one.
    """
    given = [names] if isinstance(names, str) else [*names]

    def decorate(test: Test) -> Test:
        @wraps(test)
        def all_of_them(**fixtures: Any) -> None:
            wrong = []
            for nth, case in enumerate(cases):
                try:
                    test(**fixtures, **dict(zip(given, [case] if isinstance(names, str) else case, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"in case {nth}: {case!r:.300}")
                    wrong.append(error)
            if wrong:
                raise BaseExceptionGroup(f"{len(wrong)} cases are wrong", wrong)

        signature = inspect.signature(test)
        fixtures = [each for name, each in signature.parameters.items() if name not in given]
        all_of_them.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]  # pytest reads it
        return all_of_them

    return decorate
