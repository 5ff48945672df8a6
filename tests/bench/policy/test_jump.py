"""The plot of a jump of the load: when it counts as followed, and what is drawn."""

from bench.policy.jump import AUTO, BEST, PLAIN, Course, followed_s, jumping, mean_course, panel


def test_a_jump_is_followed_when_several_windows_are_near_the_best() -> None:
    """A single fast window is not enough; without any it takes as long as there are windows."""
    best = [100.0] * 20
    assert followed_s(best, best) == 0.0
    assert followed_s([0.0, 100.0, *[0.0] * 6, *[95.0] * 12], best) == 8 * 0.05
    assert followed_s([50.0] * 20, best) == 20 * 0.05


def test_courses_have_a_mean() -> None:
    """Window by window."""
    assert mean_course([Course([1.0, 2.0], [0.0, 4.0]), Course([3.0, 4.0], [2.0, 0.0])]) == Course(
        [2.0, 3.0], [1.0, 2.0]
    )


def test_a_panel_has_a_line_for_each_setting() -> None:
    """And its title; the world goes through the loads."""
    courses = {name: Course([1.0] * 180, [float(number)] * 180) for number, name in enumerate((PLAIN, BEST, AUTO))}
    drawn = panel(0, "tokens", courses, lambda each: each.tokens)
    assert (drawn.count('stroke-width="1.5"'), ">tokens<" in drawn) == (3, True)
    assert jumping().phases == ((3.0, 1), (3.0, 32), (3.0, 1))
