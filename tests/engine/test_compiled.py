"""Compiled code that is kept on disk: wherever that fails, merges go on."""

from __future__ import annotations

import errno
import os

import pytest

from ram_trl.engine.compiled import compiled


def double(x):
    return x + x


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder in which compiled code is kept."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    return tmp_path


def test_code_is_compiled_where_it_cannot_be_kept(monkeypatch):
    def refuse(function):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("ram_trl.engine.compiled._Kept", refuse)
    assert compiled(lambda x: x + 1)(1) == 2


def test_a_full_disk_costs_kept_code_and_no_merge(cache, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._open_for_write", full)
    assert compiled(double)(1) == 2
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("bytes_left", [0, 60])
def test_kept_code_that_was_cut_short_is_made_again(cache, caplog, kind, bytes_left):
    assert compiled(double)(1) == 2
    (file,) = cache.rglob(kind)
    os.truncate(file, bytes_left)
    assert compiled(double)(1) == 2
    assert "cannot be read" in caplog.text
    caplog.clear()
    assert compiled(double)(1) == 2
    assert not caplog.text


def test_code_for_other_arguments_is_not_run(cache):
    """Whatever put it there: the index names a file, and the file says what it is for."""
    assert compiled(double)(1) == 2
    other = compiled(double)
    assert other(1.5) == 3.0
    (whole, real) = sorted(cache.rglob("*.nbc"))
    held = whole.read_bytes()
    whole.write_bytes(real.read_bytes())
    real.write_bytes(held)
    again = compiled(double)
    assert again(1.25) == 2.5
    assert again(2) == 4
