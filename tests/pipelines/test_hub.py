"""What becomes of a hub id where the hub is out of reach. Nothing here asks a real hub."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError

from accel.pipelines import hub
from accel.pipelines.errors import BadInput

Cli = Callable[..., Any]
Folder = Callable[[str], Path]


def _hub_that(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], object]) -> None:
    class Client:
        def model_info(self, name: str, *, timeout: float) -> object:
            assert timeout <= hub.PATIENCE
            return answer()

    monkeypatch.setattr(huggingface_hub, "HfApi", Client)


def _fail(error: Exception) -> object:
    raise error


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No network; an empty cache, whose folder this is."""
    _hub_that(monkeypatch, lambda: _fail(OSError(-2, "Name or service not known")))
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


def _cached(cache: Path, name: str, folder: Path) -> None:
    """Puts a pipeline where the hub's client keeps what it downloaded."""
    home = cache / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    shutil.copytree(folder, home / "snapshots" / ("0" * 40))


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "x", "--model", "owner/name"),
        ("bench", "owner/name"),
        ("prefill", "x", "--model", "owner/name"),
    ],
)
@pytest.mark.usefixtures("away")
def test_a_hub_out_of_reach_is_told_at_once_and_clearly(
    accel_cli: Cli, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = accel_cli(*command)
    assert (done.code, done.out) == (2, "")
    looking, failed = done.err.splitlines()
    assert looking == "accel: --model owner/name: no such folder here, looking on the hub"
    assert failed == (
        f"accel: --model owner/name: neither on disk ({tmp_path / 'owner/name'}) nor in the hub's "
        f"cache, and the hub ({constants.ENDPOINT}) cannot be reached: Name or service not known; "
        "give a folder, or download it where there is a network"
    )


def test_a_cached_model_works_while_the_hub_is_out_of_reach(
    accel_cli: Cli, away: Path, saved: Folder
) -> None:
    _cached(away, "owner/name", saved("sd15"))
    done = accel_cli(
        *("generate", "x", "--model", "owner/name", "--size", "64", "--steps", "2", "-o", "x.png")
    )
    assert done.code == 0, done.err
    assert Path("x.png").is_file()
    assert "Name or service not known; taking owner/name from the cache" in done.err


def test_a_cached_modular_model_works_while_the_hub_is_out_of_reach(
    accel_cli: Cli, away: Path, saved: Folder, tmp_path: Path
) -> None:
    from diffusers import ModularPipeline

    pipe = ModularPipeline.from_pretrained(str(saved("sdxl")))
    pipe.load_components()
    pipe.save_pretrained(str(tmp_path / "modular"), overwrite_modular_index=True)
    index = tmp_path / "modular" / "modular_model_index.json"
    text = index.read_text(encoding="utf-8").replace(str(tmp_path / "modular"), "owner/name")
    index.write_text(text, encoding="utf-8")
    _cached(away, "owner/name", tmp_path / "modular")
    begin = time.monotonic()
    done = accel_cli(
        *("generate", "x", "--model", "owner/name", "--size", "64", "--steps", "2", "-o", "x.png")
    )
    assert done.code == 0, done.err
    assert time.monotonic() - begin < 60


@pytest.mark.usefixtures("away")
def test_a_lora_on_a_hub_out_of_reach_is_told(accel_cli: Cli, saved: Folder) -> None:
    done = accel_cli("generate", "x", "--model", saved("sd15"), "--lora", "owner/style:0.5")
    assert done.code == 2
    looking, failed = done.remarks()
    assert looking == "accel: --lora owner/style: no such folder here, looking on the hub"
    assert failed.startswith("accel: --lora owner/style: neither on disk (")


def test_a_name_that_the_hub_does_not_know_is_told(
    accel_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    _hub_that(monkeypatch, lambda: _fail(unknown))
    done = accel_cli("generate", "x", "--model", "owner/name")
    assert done.code == 2
    assert "--model owner/name: neither on disk nor on the hub (" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("./gone", None, "no such model folder: ./gone (a model is demo, a folder or a hub id, "),
        ("file", None, "file is a file: a model is demo, a folder or a hub id, owner/name"),
        ("owner/name", "none", "--model owner/name: neither on disk nor on the hub ("),
        ("owner/name", "silent", "--model owner/name: neither on disk ("),
        (
            "owner/name",
            "broken",
            "no folder owner/name here, and the hub did not give that model: ",
        ),
    ],
)
def test_pictures_and_texts_are_refused_a_model_in_the_same_words(
    accel_cli: Cli, monkeypatch: pytest.MonkeyPatch, away: Path, name: str, answer: str, words: str
) -> None:
    Path("file").touch()
    if answer == "none":
        unknown = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        _hub_that(monkeypatch, lambda: _fail(unknown))
    if answer == "broken":
        _hub_that(monkeypatch, object)
        gone = OSError(28, "No space left on device")
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **o: _fail(gone))
    picture, text = (accel_cli(command, "x", "-m", name) for command in ("generate", "prefill"))
    assert (picture.code, text.code) == (2, 2)
    assert picture.err == text.err
    assert picture.err.splitlines()[-1].startswith(f"accel: {words}")


def test_a_hub_that_answers_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    _hub_that(monkeypatch, object)
    assert hub.unreachable("owner/name", "--model") is None


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_never_answers_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch, silent_server: str
) -> None:
    client = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: client(endpoint=silent_server))
    monkeypatch.setattr(hub, "PATIENCE", 0.3)
    begin = time.monotonic()
    reason = hub.unreachable("owner/name", "--model")
    assert reason is not None
    assert time.monotonic() - begin < 3


def test_an_impossible_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"--model owner/-name-: neither on disk nor on the hub"):
        hub.unreachable("owner/-name-", "--model")
