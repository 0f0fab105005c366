"""Cooperation of several processes: one acts and all receive the result; if one fails, all end."""

from __future__ import annotations

import json
import signal
import time

import numpy as np
import pytest

from jaxalign.config import Mesh
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.parallel.rows import place_rows
from jaxalign.parallel.sharding import make_sharding
from tests import processes
from tests.parallel import host_programs


def test_a_single_process_is_first_and_acts_itself():
    assert (hosts.count(), hosts.index(), hosts.is_first()) == (1, 0, True)
    assert hosts.once(lambda: {"a": (1, 2)}) == {"a": (1, 2)}
    with pytest.raises(UserError, match="no"):
        hosts.once(host_programs.refuse)
    hosts.wait()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return (folder, the observations of each process, how each ended)."""
    folder = tmp_path_factory.mktemp("pair")
    ended = processes.run_well(2, ["-c", f"from {host_programs.__name__} import program; program()", str(folder)])
    return folder, [json.loads((folder / f"{i}.json").read_text()) for i in range(2)], ended


@pytest.mark.process
def test_the_first_process_acts_and_both_get_the_result(pair):
    _, (first, second), _ = pair
    assert (first["count"], first["first"], second["count"], second["first"]) == (2, True, 2, False)
    assert first["results"] == second["results"] == [[i, 0] for i in range(host_programs.CALLS)]
    assert (first["acted"], second["acted"]) == (host_programs.CALLS, 0)
    assert first["inside"] == second["inside"] == 0


@pytest.mark.process
def test_both_processes_get_an_error_and_wait_for_slow_work(pair):
    for seen in pair[1]:
        assert seen["refused"] == "no"
        assert seen["waited"] > 2.5


@pytest.mark.process
def test_each_process_reads_only_its_rows_of_a_global_batch(pair):
    """On a mesh (data 2, fsdp 2, tensor 2) the first process holds the first half of the batch and nothing else."""
    _, (first, second), _ = pair
    assert first["rows"] == [0, 3, 19] and second["rows"] == [4, 7, 8, 9]
    assert not first["here"] and not second["here"]
    index = [3, 3, 19, 0, 7, 8, 9, 4]
    for seen in (first, second):
        assert seen["x"] == [[2 * i, 2 * i + 1] for i in index] and seen["y"] == index
        assert seen["sum"] == sum(5 * i + 1 for i in index)


@pytest.mark.process
def test_a_mesh_without_devices_of_one_process_is_refused(pair):
    for seen in pair[1]:
        assert seen["mesh"].startswith("the mesh uses 4 of the 8 devices of 2 processes")


@pytest.mark.process
def test_only_the_first_process_writes_and_prints(pair):
    folder, _, (first, second) = pair
    assert (folder / "metrics.jsonl").read_text() == '{"step": 0, "loss": 0}\n'
    assert "printed by 0" in first.out and "[stage] finished" in first.err
    assert "printed by" not in second.out and "[stage]" not in second.err


@pytest.mark.variants(1)
@pytest.mark.process
@pytest.mark.parametrize(("how", "code", "said"), [
    ("fault", 1, "ZeroDivisionError: a bug"), ("signal", 130, "interrupted"),
])
def test_if_one_process_fails_all_end_and_report_why(how, code, said):
    """`test_many_processes.py` has an error that the user can correct."""
    with processes.started(2, ["-c", f"from {host_programs.__name__} import failing; failing()", how]) as running:
        if how == "signal":
            for line in running[1].stderr:
                if line == "up\n":
                    break
            running[1].send_signal(signal.SIGTERM)
        waiting, failed = processes.ends(running, timeout=120)
    assert (waiting.code, failed.code) == (code, code)
    assert f"process 0 ends because process 1 did: {said}" in waiting.err
    assert said in failed.err and ("Traceback" in failed.err) == (how == "fault")


@pytest.mark.process
@pytest.mark.parametrize("killed", [0, 1])  # Process 2 is another one that is not the first.
def test_if_one_process_is_killed_all_end_soon_in_one_sentence(killed):
    with processes.started(3, ["-c", f"from {host_programs.__name__} import failing; failing()", "kill"]) as running:
        for process in running:
            while process.stderr.readline() not in ("up\n", ""):
                pass
        running[killed].kill()
        began = time.monotonic()
        found = processes.ends(running, timeout=120)
    assert time.monotonic() - began < 20
    for number, ended in enumerate(found):
        if number != killed:
            assert ended.code == 1
            assert ended.err == f"process {number} ends because process {killed} did: it was killed, or its host was lost\n"


@pytest.mark.variants(1)
@pytest.mark.process
@pytest.mark.parametrize(("how", "code", "said"), [
    ("kill", 1, "process 1 ends because process 0 did: it was killed, or its host was lost\n"),
    ("signal", 130, "process 1: interrupted\n"),
])
def test_if_the_first_process_is_stopped_and_then_killed_the_other_ends_soon_in_one_sentence(how, code, said):
    """All its calls to the service wait for an answer. With how="signal" it ends by a failure of its own while they wait."""
    with processes.started(2, ["-c", f"from {host_programs.__name__} import failing; failing()", how]) as running:
        for process in running:
            while process.stderr.readline() not in ("up\n", ""):
                pass
        running[0].send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # The watch calls the service every second.
        if how == "signal":
            running[1].send_signal(signal.SIGTERM)
            time.sleep(1)
        running[0].kill()
        began = time.monotonic()
        _, other = processes.ends(running, timeout=120)
    assert (other.code, other.err) == (code, said) and time.monotonic() - began < 5


@pytest.mark.variants(1)
@pytest.mark.process
@pytest.mark.parametrize("signalled", [(0,), (0, 1)])
def test_after_sigterm_all_processes_end_after_the_same_step(signalled):
    """`test_many_processes.py` sends the signal to the second process."""
    with processes.started(2, ["-c", f"from {host_programs.__name__} import stepping; stepping()"]) as running:
        for process in running:
            while process.stderr.readline() not in ("up\n", ""):
                pass
        time.sleep(0.5)
        for number in signalled:
            running[number].send_signal(signal.SIGTERM)
        found = processes.ends(running, timeout=60)
    last = [[line for line in ended.err.splitlines() if line.isdecimal()] for ended in found]
    assert [ended.code for ended in found] == [143, 143] and last[0] == last[1] and len(last[0]) == 1
    assert found[0].seconds < 20


def test_rows_are_placed_like_a_batch_on_the_mesh():
    sharding = make_sharding(Mesh(2, 2, 2))
    rows, index = np.arange(48).reshape(12, 4), np.asarray([11, 0, 3, 3])
    for placed, expected in ((place_rows(sharding, rows[:8]), rows[:8]), (place_rows(sharding, rows, index), rows[index])):
        assert placed.sharding == sharding.batch
        for shard in placed.addressable_shards:
            assert len(shard.data) == len(expected) // 4
            np.testing.assert_array_equal(shard.data, expected[shard.index])
    on_one_device = place_rows(make_sharding(Mesh()), rows, index)
    assert on_one_device.tolist() == rows[index].tolist()
