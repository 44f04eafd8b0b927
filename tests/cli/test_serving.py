import gc

from mailroom.cli.serving import serving


def test_collections_of_a_command_that_runs_on_pass_over_what_it_began_with() -> None:
    kept: list[object] = [[]]
    with serving(None, [], {}):
        assert not any(each is kept for each in gc.get_objects())
