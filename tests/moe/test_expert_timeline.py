"""What is computed while rows travel: read off the actions of a dry run, and timed over a simulated link."""

from importlib import import_module

import pytest

from shared.parallel.planning.costs import cost

simulation = import_module("chapters.06_data_parallel.simulation")
timeline = import_module("chapters.09_mixture_of_experts.timeline")


@pytest.fixture(scope="module", autouse=True)
def narrow():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "WIDTH", 96)
        timeline.program.cache_clear()
        yield
    timeline.program.cache_clear()


def beside(actions: list) -> dict[int, float]:
    """For each operation, in the order in which they begin, the seconds computed before it is waited for."""
    found, open_now = {}, set()
    for action in actions:
        match action:
            case simulation.Begin():
                open_now.add(len(found))
                found[len(found)] = 0.0
            case simulation.Wait():
                open_now.discard(action.number)
            case simulation.Compute():
                for number in open_now:
                    found[number] += action.seconds
    assert not open_now
    return found


def test_shared_experts_are_computed_while_rows_come_back_and_while_their_gradients_leave():
    """Numbers, rows there, rows back, gradients there, gradients back: what travels to the experts in the forward pass is waited for."""
    flops = 6 * 256 * 96 * timeline.ROWS * timeline.SEQ / timeline.two_cards.SPEED  # of a shared expert: three matrices
    assert beside(timeline.program(1)) == pytest.approx({0: 0, 1: 0, 2: flops, 3: 2 * flops, 4: 0})
    assert beside(timeline.program(0)) == {number: 0 for number in range(5)}
    assert beside(timeline.waited_for_at_once(timeline.program(1))) == {number: 0 for number in range(5)}


@pytest.mark.parametrize("link", timeline.LINKS.values(), ids=timeline.LINKS)
def test_a_step_is_shorter_by_what_is_hidden(link):
    before, after = timeline.timelines(1, link).values()
    begun = [action for action in timeline.program(1) if isinstance(action, simulation.Begin)]
    seconds = [cost(each.operation, each.bytes, each.ranks).seconds(link) for each in begun]
    hidden = sum(min(seconds[number], computed) for number, computed in beside(timeline.program(1)).items())
    assert before.total("compute") == pytest.approx(after.total("compute")) and hidden > 0
    assert before.seconds - after.seconds == pytest.approx(hidden)
    assert before.total("idle") == pytest.approx(sum(seconds))


def test_the_table_names_what_shared_experts_save():
    lines = timeline.table()
    assert len(lines) == 8 and all(line.endswith("| 0% |") == ("| 0 |" in line) for line in lines[2:])
