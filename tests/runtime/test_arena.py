"""The arena that sessions share is registered once, with regions of the expected size."""

from types import SimpleNamespace

import pytest

from ort_dynamo.runtime import arena
from ort_dynamo.runtime.arena import SharedArena


@pytest.fixture
def made(monkeypatch):
    """The settings of the arenas that were registered; none reaches ONNX Runtime."""
    found = []
    stub = SimpleNamespace(
        OrtMemoryInfo=lambda *args: args,
        OrtAllocatorType=SimpleNamespace(ORT_ARENA_ALLOCATOR="arena"),
        OrtMemType=SimpleNamespace(DEFAULT="default"),
        OrtArenaCfg=lambda settings: settings,
        create_and_register_allocator=lambda place, settings: found.append(settings),
    )
    monkeypatch.setattr(arena, "onnxruntime", lambda: stub)
    return found


@pytest.mark.parametrize(
    ("expected", "region"),
    [(None, 32 << 20), (0, 32 << 20), (1000, 32 << 20), (100 << 20, 150 << 20), (8 << 30, 2**31 - 256)],
)
def test_the_first_region_has_room_for_the_expected_bytes(made, expected, region):
    own = SharedArena()
    if expected is not None:
        own.expect(expected)
    own.register()
    assert [settings["initial_chunk_size_bytes"] for settings in made] == [region]


def test_it_is_registered_once(made):
    own = SharedArena()
    assert not own.registered
    own.register()
    own.register()
    assert own.registered
    assert len(made) == 1


def test_an_arena_of_the_program_is_taken_as_it_is(made, monkeypatch):
    def refuse(place, settings):
        raise RuntimeError("An allocator for this device has already been registered for sharing.")

    monkeypatch.setattr(arena.onnxruntime(), "create_and_register_allocator", refuse)
    own = SharedArena()
    own.register()
    assert own.registered


def test_other_errors_are_not_hidden(made, monkeypatch):
    def refuse(place, settings):
        raise RuntimeError("no")

    monkeypatch.setattr(arena.onnxruntime(), "create_and_register_allocator", refuse)
    with pytest.raises(RuntimeError, match="no"):
        SharedArena().register()
