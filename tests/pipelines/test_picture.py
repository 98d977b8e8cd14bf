import json
from pathlib import Path

import pytest
from PIL import Image

from accel.pipelines import picture
from accel.pipelines.errors import AccelError, BadInput
from accel.pipelines.settings import Lora, Settings, parse_size

SETTINGS = Settings(
    "ein Kreis, größer",
    seed=7,
    steps=3,
    guidance=2.5,
    extra={"sigmas": [1.0, 0.5]},
    loras=(Lora("style.safetensors", 0.5, "00ff"),),
)


@pytest.fixture
def image() -> Image.Image:
    return Image.linear_gradient("L").convert("RGB")


def test_settings_survive_the_picture(tmp_path: Path, image: Image.Image) -> None:
    path = tmp_path / "p.png"
    picture.write(path, picture.png_bytes(image, SETTINGS, {"torch": "2"}))
    assert picture.read_settings(path) == (SETTINGS, {"torch": "2"})
    with Image.open(path) as again:
        assert again.tobytes() == image.tobytes()


def test_the_same_settings_give_the_same_bytes(image: Image.Image) -> None:
    first, second = (picture.png_bytes(image, SETTINGS, {"torch": "2"}) for _ in range(2))
    assert first == second
    assert first != picture.png_bytes(image, SETTINGS.changed(seed=8), {"torch": "2"})


def test_names_of_later_versions_are_left_out() -> None:
    data = json.loads(json.dumps({**SETTINGS.to_dict(), "later": 1}))
    assert Settings.from_dict(data) == SETTINGS


def test_a_picture_without_settings_is_refused(tmp_path: Path, image: Image.Image) -> None:
    path = tmp_path / "p.png"
    image.save(path)
    with pytest.raises(BadInput, match="carries no settings of accel"):
        picture.read_settings(path)


@pytest.mark.parametrize("text", ["{", "[1]", '{"loras": [{"colour": 1}]}', '"words"'])
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, image: Image.Image, text: str
) -> None:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_itxt(picture.CHUNK, text)
    image.save(tmp_path / "p.png", pnginfo=info)
    with pytest.raises(BadInput, match="unreadable settings"):
        picture.read_settings(tmp_path / "p.png")


def test_a_file_that_is_no_picture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_text("no picture", encoding="utf-8")
    with pytest.raises(BadInput, match="no picture can be read there"):
        picture.read_settings(tmp_path / "p.png")


def test_a_failed_write_leaves_the_old_picture_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.png"
    path.write_bytes(b"old")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(picture.os, "replace", full)
    with pytest.raises(AccelError, match="cannot be written: No space left on device"):
        picture.write(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["p.png"]
    assert path.read_bytes() == b"old"


def test_a_name_as_long_as_names_may_be_is_written(tmp_path: Path) -> None:
    path = tmp_path / f"{'a' * 251}.png"
    picture.write(path, b"x")
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_size_beyond_the_machines_memory_is_refused() -> None:
    assert parse_size("4096x2048") == (4096, 2048)
    with pytest.raises(BadInput, match=r"--size 1000000: .* takes at least 59604 GiB .*lower --si"):
        parse_size("1000000")


@pytest.mark.parametrize("text", ["", "0", "64x0", "-64", "64x", "64,64", "big"])
def test_a_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="a size is 512 or 768x512"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("a.safetensors", Lora("a.safetensors")),
        ("a.safetensors:0.25", Lora("a.safetensors", 0.25)),
        ("C:/a.safetensors", Lora("C:/a.safetensors")),
        ("owner/name:-1", Lora("owner/name", -1.0)),
    ],
)
def test_a_lora_may_carry_its_scale(text: str, lora: Lora) -> None:
    assert Lora.parse(text) == lora
