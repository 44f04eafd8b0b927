"""The public names of `spark_jobs` are listed like those of the other packages; that page needs no Spark, they do."""

from tests.project import test_public as pages


def test_public_names_of_spark_jobs_are_those_that_are_listed() -> None:
    pages.names_are_those_that_are_listed("spark_jobs")
