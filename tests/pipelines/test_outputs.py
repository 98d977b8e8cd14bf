from pathlib import Path

import pytest

from accel.pipelines.errors import BadInput
from accel.pipelines.outputs import paths_for, slug
from accel.pipelines.settings import Settings

RED, BLUE = Settings("a red circle", seed=1), Settings("a blue square", seed=2)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_pattern_is_filled_for_every_picture() -> None:
    paths = paths_for("out/{index:03}-{prompt}-{seed}.png", [RED, BLUE])
    assert [str(p) for p in paths] == ["out/000-a-red-circle-1.png", "out/001-a-blue-square-2.png"]


def test_without_a_pattern_names_tell_the_picture() -> None:
    assert paths_for(None, [RED]) == [Path("a-red-circle-1.png")]
    assert paths_for(None, [RED, RED]) == [
        Path("0-a-red-circle-1.png"),
        Path("1-a-red-circle-1.png"),
    ]


def test_a_folder_takes_such_names(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    assert paths_for("pictures", [RED]) == [Path("pictures/a-red-circle-1.png")]
    assert paths_for("other/", [RED]) == [Path("other/a-red-circle-1.png")]


@pytest.mark.parametrize("pattern", ["one.png", "{prompt}.png"])
def test_two_pictures_never_go_to_one_path(pattern: str) -> None:
    with pytest.raises(BadInput, match=r"put \{index\} into the name"):
        paths_for(pattern, [RED, Settings("a red circle", seed=2)])


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("{color}.png", r"no \{color\} here; a pattern may hold \{index\}"),
        ("{.png", "expected '}'"),
        ("", r'--output "": a \.png, a folder or a pattern is wanted; leave it out for names from'),
        ("{}.png", "no {} here"),
        ("{seed:q}.png", "Unknown format code"),
        ("picture.jpg", r"name it picture\.png, or write picture\.jpg/ for a folder"),
        ("new/pictures", r"name it pictures\.png, or write new/pictures/ for a folder"),
    ],
)
def test_a_wrong_pattern_is_explained(pattern: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        paths_for(pattern, [RED])


def test_pictures_are_not_compared_each_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []
    equal = Path.__eq__
    monkeypatch.setattr(Path, "__eq__", lambda a, b: (compared.append(True), equal(a, b))[1])
    assert len(paths_for("{index}.png", [RED] * 300)) == 300
    assert len(compared) < 300  # 300 * 299 / 2 made 20,000 pictures wait half a minute


def test_a_path_through_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BadInput, match=r"cannot write in .*file: Not a directory"):
        paths_for("file/picture.png", [RED])


@pytest.mark.parametrize("pattern", ["{long}.png", "new/{long}/x.png", "new/{long}.png", "{long}/"])
def test_a_name_too_long_for_the_disk_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(BadInput, match=r"--output .*: cannot write in .*: File name too long$"):
        paths_for(pattern.replace("{long}", "a" * 300), [RED])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_named_like_a_picture_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a-red-circle-1.png").mkdir()
    with pytest.raises(BadInput, match="that is a folder"):
        paths_for(None, [RED])


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    paths_for("new/folder/picture.png", [RED])
    assert list(tmp_path.iterdir()) == []


def test_a_slug_is_always_a_name() -> None:
    assert slug("!?") == "picture"
    assert slug("Größe / Farbe") == "größe-farbe"
    assert len(slug("word " * 100)) <= 40
