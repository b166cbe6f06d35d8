import re
from xml.etree import ElementTree

from flatpeak.report.curves import Curve, curve_svg, moving_average


def test_a_running_mean_is_over_the_values_around():
    assert moving_average([1, 2, 3, 4, 8], 1) == [1.5, 2, 3, 5, 6]
    assert moving_average([1, 2, 3], 0) == [1, 2, 3]
    assert moving_average([], 3) == []


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    """The drawn lines with a colour of the cycle, as points."""
    paths = re.findall(r'<path d="([^"]+)"[^>]*style="fill: none; stroke: #1f77b4', svg)
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)] for path in paths]


def test_a_curve_is_drawn_through_its_values():
    svg = curve_svg("Reward", [Curve(label="reward", steps=[0, 5, 10], values=[0.0, 1.0, 0.5])])
    ElementTree.fromstring(svg)  # well formed, and nothing before the element
    [points] = [line for line in points_of(svg) if len(line) == 3]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert abs((x1 - x0) - (x2 - x1)) < 1e-3
    # SVG counts y downwards.
    assert abs((y0 - y1) - 2 * (y0 - y2)) < 1e-3
    assert ">Reward</text>" in svg


def test_many_points_get_a_running_mean_and_few_do_not():
    few = Curve(label="x", steps=range(40), values=[0.0, 1.0] * 20)
    many = Curve(label="x", steps=range(100), values=[0.0, 1.0, 2.0, 1.0, 1.0] * 20)
    assert [len(line) for line in points_of(curve_svg("a", [few])) if len(line) > 2] == [40]
    lines = [line for line in points_of(curve_svg("a", [many])) if len(line) > 2]
    assert len(lines) == 2
    # Eleven values around each: two periods of mean 1, and one more; far flatter than the curve.
    raw, smooth = ([y for _, y in line] for line in lines)
    assert 10 < (max(raw) - min(raw)) / (max(smooth[5:-5]) - min(smooth[5:-5])) < 12


def test_intervals_are_drawn_from_low_to_high():
    curve = Curve(label="x", steps=[0, 1], values=[0.5, 0.5], intervals=[(0.25, 1.0), None])
    svg = curve_svg("a", [curve])
    bars = [line for line in points_of(svg) if len(line) == 2 and line[0][0] == line[1][0]]
    [(low, high), (same_low, same_high)] = [sorted(y for _, y in bar) for bar in bars]
    [value] = {y for line in points_of(svg) if len(line) == 2 and line[0][0] != line[1][0] for _, y in line}
    assert abs((high - value) * 2 - (value - low)) < 1e-3
    assert same_low == same_high == value


def test_several_curves_have_a_legend_and_one_has_none():
    one = Curve(label="only", steps=[0, 1], values=[0, 1])
    two = Curve(label="other", steps=[0, 1], values=[1, 0])
    assert ">only</text>" not in curve_svg("a", [one])
    both = curve_svg("a", [one, two])
    assert ">only</text>" in both
    assert ">other</text>" in both


def test_a_single_curve_of_several_possible_ones_is_named_too():
    one = Curve(label="only", steps=[0, 1], values=[0, 1])
    assert ">only</text>" in curve_svg("a", [one], legend=True)


def test_the_axes_name_what_they_count():
    one = Curve(label="only", steps=[0, 1], values=[0, 1])
    assert ">nats</text>" in curve_svg("a", [one], unit="nats")
    both = curve_svg("a", [one], right=[one], unit="nats", right_unit="tokens")
    assert ">nats</text>" in both
    assert ">tokens</text>" in both


def test_curves_that_coincide_both_show():
    curves = [Curve(label=label, steps=[0, 1, 2], values=[0, 1, 2]) for label in ("under", "over")]
    svg = curve_svg("a", curves)
    widths = [
        float(width)
        for path, width in re.findall(r'<path d="([^"]+)"[^>]*style="fill: none;[^"]*stroke-width: ([\d.]+)', svg)
        if path.count("L") == 2
    ]
    assert len(widths) >= 2
    assert widths[0] > widths[1]


def test_a_flat_curve_between_0_and_1_has_an_axis_from_0_to_1():
    flat, rising = (Curve(label="x", steps=[0, 1], values=values) for values in ([1.0, 1.0], [0.5, 0.51]))
    assert {">0.0</text>", ">1.0</text>"} <= set(re.findall(r">[\d.]+</text>", curve_svg("a", [flat])))
    assert ">0.0</text>" not in curve_svg("a", [rising])


def test_titles_stand_at_one_place_whatever_the_numbers_beside_the_axes():
    short, long = (Curve(label="x", steps=[0, 1], values=values) for values in ([1.0, 2.0], [0.00125, 0.00375]))
    places = {
        re.search(
            r"translate\(([\d.]+) ([\d.]+)\)\"?>A title</text>|x=\"([\d.]+)\" y=\"([\d.]+)\"[^>]*>A title</text>", svg
        )
        for svg in (curve_svg("A title", [short]), curve_svg("A title", [long], unit="nats"))
    }
    assert None not in places
    assert len({place.groups() for place in places if place}) == 1


def heights(svg: str) -> tuple[float, float]:
    """Those of the picture and of its axes, in points."""
    picture = float(re.findall(r'height="([\d.]+)pt"', svg)[0])
    [axes] = re.findall(r'<clipPath id="[^"]+">\s*<rect [^>]*height="([\d.]+)"', svg)
    return picture, float(axes)


def test_a_legend_adds_to_the_height_of_a_chart_and_takes_nothing_from_its_axes():
    curves = [Curve(label=f"curve {i}", steps=[0, 1], values=[0, i]) for i in range(1, 8)]
    (plain, axes), (named, named_axes) = heights(curve_svg("a", curves[:1])), heights(curve_svg("a", curves))
    assert named > plain + 30
    assert abs(named_axes - axes) < 12


def test_a_chart_has_the_colour_of_the_pages_text_and_no_ground_of_its_own():
    svg = curve_svg("a", [Curve(label=label, steps=[0, 1], values=[0, 1]) for label in ("one", "two")], unit="nats")
    assert "currentColor" in svg
    assert "#000000" not in svg
    assert not re.search(r"fill: (#ffffff|white)(?!; opacity: 0)", svg)
