"""The public names of `spark_jobs`, under the rules of those of the other packages."""

from collections.abc import Callable

import pytest

from tests import test_public as rules


@pytest.mark.parametrize(
    "rule",
    [
        rules.test_public_names_are_those_that_are_listed,
        rules.test_class_that_works_on_connections_has_an_async_one_with_the_same_methods,
        rules.test_what_public_calls_return_is_public,
    ],
)
def test_public_names_of_spark_jobs_keep_the_rules(rule: Callable[[str], None]) -> None:
    rule("spark_jobs")
