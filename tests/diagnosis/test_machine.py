"""The doctor's findings about the machine: each reports its values, and a remedy where something is amiss."""

from __future__ import annotations

import collections

import jax
import pytest

from jaxalign.diagnosis import machine


def test_the_versions_are_those_that_are_imported():
    finding = machine.versions()
    assert finding.status == "ok"
    assert f"jax {jax.__version__}," in finding.text and f"jaxlib {jax.lib.__version__}" in finding.text


def test_a_jaxlib_of_another_minor_version_is_a_problem(monkeypatch):
    monkeypatch.setattr(machine, "version_of", lambda name: "0.9.1" if name == "jaxlib" else None)
    finding = machine.versions()
    assert finding.status == "problem" and f"jaxlib 0.9.1 and jax {jax.__version__} must have the same version" in finding.text


def test_all_devices_are_counted():
    (finding,) = machine.devices()
    assert finding.status == "ok" and finding.text.startswith(f"{len(jax.devices())} x cpu (platform cpu)")


@pytest.mark.parametrize(("platform", "chosen", "files", "status", "remedy"), [
    ("cpu", "", "/dev/nvidia0", "problem", "pip install -U 'jaxalign[cuda]'"),
    ("cpu", "", "/dev/accel0", "problem", "pip install -U 'jaxalign[tpu]'"),
    ("cpu", "cpu", "/dev/nvidia0", "note", "unset it to use the device"),
    ("gpu", "", "/dev/nvidia0", None, None),
    ("cpu", "", "", None, None),
])
def test_an_accelerator_that_is_not_used_is_reported_with_its_remedy(monkeypatch, platform, chosen, files, status, remedy):
    monkeypatch.setenv("JAX_PLATFORMS", chosen)
    found = machine.unused_accelerators(platform, lambda pattern: [files] if files[:8] == pattern[:8] and files else [])
    assert [finding.status for finding in found] == ([] if status is None else [status])
    assert all(remedy in finding.text for finding in found)


@pytest.mark.parametrize(("mode", "tunables", "status"), [
    ("[always] madvise never", "", "ok"), ("always [madvise] never", "glibc.malloc.hugetlb=1", "ok"),
    ("always [madvise] never", "", "note"), ("always madvise [never]", "glibc.malloc.hugetlb=1", "note"),
])
def test_huge_pages_need_the_kernel_and_on_madvise_the_allocator(tmp_path, monkeypatch, mode, tunables, status):
    (tmp_path / "enabled").write_text(f"{mode}\n")
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    assert machine.huge_pages(tmp_path / "enabled").status == status


def test_a_system_without_the_setting_for_huge_pages_is_fine(tmp_path):
    assert machine.huge_pages(tmp_path / "enabled").status == "ok"


def test_the_cache_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    with open(tmp_path / "jit_f-1-cache", "wb") as program:
        program.truncate(3 * 2**28)
    (tmp_path / "jit_f-1-atime").write_bytes(bytes(8))
    finding = machine.compile_cache()
    assert finding.status == "ok" and f"{tmp_path}, 1 programs, 0.75 GiB" in finding.text


def test_a_cache_that_cannot_be_made_is_a_note_with_its_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    finding = machine.compile_cache()
    assert finding.status == "note" and "set config.compile_cache" in finding.text


@pytest.mark.parametrize(("free", "status"), [(0.5 * 2**30, "problem"), (5 * 2**30, "note"), (50 * 2**30, "ok")])
def test_a_full_disk_is_reported(tmp_path, monkeypatch, free, status):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage(2**40, 0, free))
    assert [finding.status for finding in machine.disk(tmp_path)] == [status, status]


def test_a_folder_that_cannot_be_written_is_a_problem_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "access", lambda folder, mode: folder != tmp_path)
    found = machine.disk(tmp_path)[0]
    assert (found.topic, found.status) == ("disk", "problem")
    assert found.text == f"{tmp_path} cannot be written; choose another --workdir"
