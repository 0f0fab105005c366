"""All processes of a run are counted before JAX starts; a missing or wrong process is named."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from jaxalign.errors import UserError
from jaxalign.parallel.roll_call import call
from tests.processes import free_port


def together(callers, timeout=10.0, address="localhost"):
    """For each caller (number of processes, own number): None or the error, and the seconds that it took."""
    coordinator, errors = f"{address}:{free_port()}", [None] * len(callers)

    def run(at, processes, process):
        try:
            call(coordinator, processes, process, timeout)
        except UserError as error:
            errors[at] = str(error)

    threads = [threading.Thread(target=run, args=(at, *caller)) for at, caller in enumerate(callers)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [sentence and sentence.replace(coordinator, "HOST:PORT") for sentence in errors], time.monotonic() - began


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_all_processes_continue_once_all_have_arrived_in_any_order(address):
    errors, seconds = together([(4, 2), (4, 3), (4, 0), (4, 1)], address=address)
    assert errors == [None] * 4
    assert seconds < 5


def test_all_processes_name_a_missing_process():
    errors, seconds = together([(4, 0), (4, 2)], timeout=1.5)
    assert errors[0] == ("2 of 4 processes have reported to HOST:PORT within 1.5 s; missing: 1, 3. Start them, or raise "
                         "--start_timeout")
    assert errors[1] == f"process 2: {errors[0]}"
    assert seconds < 6


def test_without_process_0_the_address_is_named():
    (errors,), seconds = together([(2, 1)], timeout=1.0)
    assert errors.startswith("process 1 cannot reach process 0 at HOST:PORT within 1 s (Connection refused); start process 0")
    assert seconds < 3


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(UserError, match="process 1 cannot reach process 0 at nowhere.invalid:1234 within 1 s"):
        call("nowhere.invalid:1234", 2, 1, 1.0)


def test_two_processes_with_the_same_number_are_refused():
    errors, _ = together([(3, 0), (3, 1), (3, 1)])
    assert errors[0] == "two processes have the number 1; give each its own --process"
    assert errors[1:] == [f"process 1: {errors[0]}"] * 2


def test_different_numbers_of_processes_are_refused():
    errors, _ = together([(2, 0), (3, 1)])
    assert errors[0] == "process 1 was started for 3 processes, process 0 for 2; give all processes the same --processes"
    assert errors[1] == f"process 1: {errors[0]}"


def test_a_port_in_use_is_reported():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"process 0 cannot listen at localhost:{port} .*choose another port"):
            call(f"localhost:{port}", 2, 0, 1.0)


def test_unrelated_connections_to_the_port_do_not_count():
    port = free_port()
    errors = []

    def first():
        call(f"localhost:{port}", 2, 0, 10.0)
        errors.append(0)

    thread = threading.Thread(target=first)
    thread.start()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"process": 1, "processes": 2}\n', b""):
        until = time.monotonic() + 5
        while True:
            try:
                with socket.create_connection(("localhost", port), timeout=1) as stranger:
                    stranger.sendall(words)
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.05)
    call(f"localhost:{port}", 2, 1, 10.0)
    thread.join()
    assert errors == [0]


def test_a_restarted_process_takes_its_old_place():
    port = free_port()
    thread = threading.Thread(target=call, args=(f"localhost:{port}", 3, 0, 10.0))
    thread.start()
    until = time.monotonic() + 5
    while True:
        try:
            with socket.create_connection(("localhost", port), timeout=1) as gone:
                gone.sendall(b'{"word": "jaxalign", "process": 1, "processes": 3}\n')
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)
    other = threading.Thread(target=call, args=(f"localhost:{port}", 3, 2, 10.0))
    other.start()
    time.sleep(0.5)  # All would be present if the first process had not left.
    assert thread.is_alive() and other.is_alive()
    call(f"localhost:{port}", 3, 1, 10.0)
    for each in (thread, other):
        each.join(5)
        assert not each.is_alive()


def _say(port, words):
    """Connects to a port once it is open, sends `words`, and returns the open connection."""
    until = time.monotonic() + 5
    while True:
        try:
            stranger = socket.create_connection(("localhost", port), timeout=1)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)
        else:
            stranger.sendall(words)
            return stranger


def _receiving(port, processes, timeout):
    errors = []

    def first():
        try:
            call(f"localhost:{port}", processes, 0, timeout)
        except UserError as error:
            errors.append(str(error))

    thread = threading.Thread(target=first)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("number", ["7", "-5", "0", "true", "1.0", "null", "9" * 2000, "[" * 3000])
def test_a_number_that_no_process_has_does_not_count(number):
    port = free_port()
    thread, errors = _receiving(port, 2, 1.0)
    with _say(port, f'{{"word": "jaxalign", "process": {number}, "processes": 2}}\n'.encode()):
        thread.join()
    assert len(errors) == 1 and "1 of 2 processes have reported" in errors[0]


def test_silent_callers_delay_no_others():
    port = free_port()
    thread, errors = _receiving(port, 2, 20.0)
    silent = [_say(port, b"") for _ in range(8)] + [_say(port, b'{"word": ')]
    began = time.monotonic()
    call(f"localhost:{port}", 2, 1, 20.0)
    thread.join()
    assert time.monotonic() - began < 3 and errors == []
    for stranger in silent:
        stranger.close()


def test_silent_callers_do_not_extend_the_time_limit():
    port = free_port()
    thread, errors = _receiving(port, 2, 1.0)
    began = time.monotonic()
    with _say(port, b"{"), _say(port, b""):
        thread.join()
    assert time.monotonic() - began < 3 and "missing: 1" in errors[0]
