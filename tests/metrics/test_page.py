"""The page of metrics names every metric that is answered, and none besides."""

from tests.metrics_page import PAGE, page


def test_rows_of_the_page_are_the_metrics() -> None:
    """`python -m tests.metrics_page` writes them."""
    assert PAGE.read_text() == page()
