"""The available memory, according to the system and to MLX."""

import mlx.core as mx
import pytest

from mlxspec.engine.machine import free_memory, whole_memory


def test_memory_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 20 < free_memory() <= whole_memory() < 1 << 50
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(
        mx, "device_info", lambda device: {"max_recommended_working_set_size": 1 << 34}
    )
    assert whole_memory() == 1 << 34
    assert free_memory() == (1 << 34) - mx.get_active_memory() - mx.get_cache_memory()
