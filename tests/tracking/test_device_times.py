"""The report's section on the programs of each group of devices."""

from __future__ import annotations

import json

import pytest

from jaxalign.errors import UserError
from jaxalign.tracking import device_times
from jaxalign.tracking.device_times import FILE, IterationTimes, ProgramTime, is_recorded, seconds_without_programs
from jaxalign.tracking.report.device_times import typical

from .pages import render_page
from .synthetic import make_run

GROUPS = {"0": ("policy", "critic"), "1": ("reference", "generator")}


def row(iteration, seconds=10.0, first=False, groups=GROUPS):
    """An iteration in which device 0 works for 4 of 10 seconds, device 1 for 5.5, and neither for 0.5."""
    programs = (("generate", "1", 0.0, 5.0), ("reference", "1", 5.0, 5.5), ("values", "0", 5.5, 6.0),
                ("policy and critic update", "0", 6.5, 10.0))
    scale = seconds / 10
    return IterationTimes(iteration, first, seconds, groups, tuple(
        ProgramTime(name, (group,), start * scale, end * scale) for name, group, start, end in programs))


def report(path, rows, **ppo):
    make_run(path)
    config = json.loads((path / "config.json").read_text())
    config["ppo"] |= ppo
    (path / "config.json").write_text(json.dumps(config))
    for one in rows:
        device_times.append(path / "ppo" / FILE, one)
    return render_page(path)


def test_the_section_has_the_shares_of_all_iterations_but_the_first(tmp_path):
    source, page = report(tmp_path, [row(0, 100.0, True), *(row(i, 9.0 + i % 3) for i in range(1, 7))])
    text = page.text("devices-ppo")
    assert "Share of the time of 6 iterations, without the first." in text
    assert "0: policy, critic 60.0% - - 5.0% 35.0%" in text and "1: reference, generator 45.0% 50.0% 5.0% - -" in text
    assert "Device 0 (policy, critic) was idle for 60.0% of the time, the largest share of all groups." in text
    assert "For 5.0% of the time no device ran one of these programs" in text
    # Sampling takes 50% and the update 35%, which is what their overlap saves.
    assert "ppo.sample_ahead=True, responses would be sampled during the update, which saves at most 35.0%" in text
    assert 'href="#devices-ppo">Devices</a>' in source and "Programs of 3 typical iterations" in text


@pytest.mark.parametrize("ppo", [{"sample_ahead": True}, {"advantages": "remax"}, {"checks": {"ratio": "stop"}}])
def test_sampling_ahead_is_advised_only_if_the_config_allows_it(tmp_path, ppo):
    assert "sample_ahead" not in report(tmp_path, [row(i, first=i == 0) for i in range(3)], **ppo)[1].text("devices-ppo")


def test_the_devices_that_the_others_wait_for_are_named(tmp_path):
    groups = {"0": ("policy",), "1": ("reference",)}
    programs = (ProgramTime("reference", ("1",), 0.0, 1.0), ProgramTime("policy update", ("0",), 1.0, 10.0))
    rows = [IterationTimes(i, i == 0, 10.0, groups, programs) for i in range(3)]
    text = report(tmp_path, rows)[1].text("devices-ppo")
    assert "Device 1 (reference) was idle for 90.0%" in text
    assert "Meanwhile, device 0 was busy for 90.0% of the time" in text


def test_a_run_without_a_placement_has_no_section_and_one_iteration_a_reason(tmp_path):
    assert "devices-ppo" not in report(tmp_path / "flat", [])[1].sections
    text = report(tmp_path / "started", [row(0, first=True)])[1].text("devices-ppo")
    assert text.endswith("Stage ppo has recorded no iteration yet except its first, which waits for the compiler.")


def test_only_the_newest_placement_counts(tmp_path):
    groups = {"2": ("policy", "critic"), "3": ("reference", "generator")}
    rows = [row(0, first=True), *(row(i) for i in range(1, 5)), row(5, first=True, groups=groups)]
    newest = IterationTimes(6, False, 2.0, groups, (ProgramTime("generate", ("3",), 0.0, 1.0),))
    text = report(tmp_path, [*rows, newest])[1].text("devices-ppo")
    assert "1 iteration, without the first" in text and "2: policy, critic 100.0% -" in text and "0: policy" not in text


def test_typical_iterations_are_consecutive_and_close_to_the_median():
    rows = [row(i, seconds) for i, seconds in ((1, 30.0), (2, 10.0), (3, 11.0), (4, 10.0), (5, 12.0), (6, 25.0))]
    # The median is 11.5; iterations 3 to 5 differ from it by 0.5 + 1.5 + 0.5, and 2 to 4 by 1.5 + 0.5 + 1.5.
    assert [one.iteration for one in typical(rows)] == [3, 4, 5]
    # From iteration 256 on, not every one is recorded.
    assert [one.iteration for one in typical([row(254), row(256), row(258)])] == [254]


def test_overlapping_programs_count_once_in_the_time_without_programs():
    programs = [ProgramTime("a", ("0",), 1.0, 4.0), ProgramTime("b", ("1",), 2.0, 3.0), ProgramTime("c", ("1",), 5.0, 6.0)]
    assert seconds_without_programs(IterationTimes(1, False, 10.0, GROUPS, tuple(programs))) == pytest.approx(6.0)


def test_the_file_keeps_all_of_the_first_iterations_and_fewer_of_the_later_ones():
    assert all(map(is_recorded, range(256)))
    assert [i for i in range(256, 264) if is_recorded(i)] == [256, 258, 260, 262]
    assert [i for i in range(1024, 1041) if is_recorded(i)] == [1024, 1032, 1040]
    assert sum(map(is_recorded, range(1_000_000))) < 2000


@pytest.mark.parametrize("line", ['{"iteration": 1}', '{"iteration": 1, "first": false, "seconds": "long", "groups": {}, '
                                  '"programs": []}', '{"iteration": 1, "first": false, "seconds": 1, "groups": [], '
                                  '"programs": []}'])
def test_a_damaged_row_is_named(tmp_path, line):
    (tmp_path / FILE).write_text(line + "\n")
    with pytest.raises(UserError, match="row 1 has another form than expected .* remove the row, or the file"):
        device_times.read_device_times(tmp_path / FILE)
