"""The text of metrics, byte by byte."""

import pytest

from mailroom.metrics.family import Family, Histogram, Samples, text

GAUGE = Family("inbox_messages", "gauge", "Messages that wait.", ("inbox",))
SECONDS = Family("handle_seconds", "histogram", "How long handlers took.\nEach.", ("inbox",))


def test_text_of_a_gauge_and_a_histogram() -> None:
    took = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        took.observe(value)
    took.observe(0.2, times=2)
    samples: dict[Family, Samples] = {
        GAUGE: [(("shipping",), 3), (("billing",), float("inf"))],
        SECONDS: [(("shipping",), took)],
    }
    assert text({'a "node"\\': samples}) == (
        "# HELP mailroom_inbox_messages Messages that wait.\n"
        "# TYPE mailroom_inbox_messages gauge\n"
        'mailroom_inbox_messages{node="a \\"node\\"\\\\",inbox="shipping"} 3\n'
        'mailroom_inbox_messages{node="a \\"node\\"\\\\",inbox="billing"} +Inf\n'
        "# HELP mailroom_handle_seconds How long handlers took.\\nEach.\n"
        "# TYPE mailroom_handle_seconds histogram\n"
        'mailroom_handle_seconds_bucket{node="a \\"node\\"\\\\",inbox="shipping",le="0.1"} 2\n'
        'mailroom_handle_seconds_bucket{node="a \\"node\\"\\\\",inbox="shipping",le="1.0"} 5\n'
        'mailroom_handle_seconds_bucket{node="a \\"node\\"\\\\",inbox="shipping",le="+Inf"} 6\n'
        'mailroom_handle_seconds_sum{node="a \\"node\\"\\\\",inbox="shipping"} 8.05\n'
        'mailroom_handle_seconds_count{node="a \\"node\\"\\\\",inbox="shipping"} 6\n'
    )


def test_many_values_are_counted_as_each_by_itself() -> None:
    for values in ((), (0.3,), (0.3, 0.4), (0.1, 0.3, 7.0, 0.1), (0.25, 0.2500001)):
        one_by_one, at_once = Histogram((0.1, 0.25, 1.0)), Histogram((0.1, 0.25, 1.0))
        for value in values:
            one_by_one.observe(value)
        at_once.observe_all(values)
        assert at_once.counts == one_by_one.counts, values
        assert at_once.sum == pytest.approx(one_by_one.sum), values
