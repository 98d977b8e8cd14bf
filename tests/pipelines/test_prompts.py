import io
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.pipelines.errors import BadInput
from accel.pipelines.prompts import parse_extra, read_prompts, settings_for
from accel.pipelines.settings import Settings


def test_a_file_holds_one_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a red circle\n\n  größer  \n", encoding="utf-8")
    assert read_prompts([], str(file)) == ["a red circle", "größer"]


def test_a_mark_at_the_beginning_is_no_part_of_a_prompt(
    tmp_path: Path, piped: Callable[[str], None]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a red circle\r\ntwo\r\n", encoding="utf-8-sig")
    assert read_prompts([], str(file)) == ["a red circle", "two"]
    piped("\ufeffone\n")
    assert read_prompts([], "-") == ["one"]


def test_only_newlines_part_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a red\u2028circle\x0band more\ntwo\n", encoding="utf-8")
    assert read_prompts([], str(file)) == ["a red\u2028circle\x0band more", "two"]


def test_a_dash_is_stdin(piped: Callable[[str], None]) -> None:
    piped("one\ntwo\n")
    assert read_prompts([], "-") == ["one", "two"]


def _stdin(content: bytes, locale: str) -> io.TextIOWrapper:
    """Stdin as python opens it where the locale is C or POSIX: what is no text passes."""
    return io.TextIOWrapper(io.BytesIO(content), locale, errors="surrogateescape")


def test_stdin_is_utf_8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", _stdin("größer\n".encode(), "ascii"))
    assert read_prompts([], "-") == ["größer"]


def test_stdin_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", _stdin(b"\xff\xfe\n", "utf-8"))
    with pytest.raises(BadInput, match=r"^--prompts -: not a text file \(UTF-8\)$"):
        read_prompts([], "-")


def test_a_closed_stdin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # what python makes of `<&-`
    with pytest.raises(BadInput, match="--prompts -: stdin is closed"):
        read_prompts([], "-")


def test_a_files_name_is_no_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    assert read_prompts([str(file), f"{'a' * 5000}.txt"], None)[0] == str(file), "no such file"
    file.write_text("a red circle\n")
    with pytest.raises(BadInput, match=r"prompts\.txt is a file: --prompts .* reads its lines"):
        read_prompts(["a red circle", str(file)], None)


def test_prompts_come_from_one_place(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not both"):
        read_prompts(["x"], "-")


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="no prompt in it"):
        read_prompts([], str(tmp_path / "empty"))
    with pytest.raises(BadInput, match=r"--prompts .*binary: not a text file \(UTF-8\)$"):
        read_prompts([], str(tmp_path / "binary"))
    with pytest.raises(BadInput, match=r"missing: cannot be read: No such file or directory$"):
        read_prompts([], str(tmp_path / "missing"))


def test_every_prompt_gets_the_same_seeds() -> None:
    made = settings_for(Settings(), ["a", "b"], 2, 5)
    assert [(s.prompt, s.seed) for s in made] == [("a", 5), ("a", 6), ("b", 5), ("b", 6)]


def test_seeds_stay_in_range_and_are_drawn_where_none_is_given() -> None:
    assert [s.seed for s in settings_for(Settings(), ["a"], 2, 2**32 - 1)] == [2**32 - 1, 0]
    drawn = {settings_for(Settings(), ["a"], 1, None)[0].seed for _ in range(20)}
    assert len(drawn) > 1


def test_extra_arguments_are_json_where_they_can_be() -> None:
    pairs = ["a=1", "b=0.5", "c=true", "d=some words", "e=[1, 2]", "f=x=y"]
    expected = {"a": 1, "b": 0.5, "c": True, "d": "some words", "e": [1, 2], "f": "x=y"}
    assert parse_extra(pairs) == expected


@pytest.mark.parametrize("pair", ["a", "=1", "1a=2", ""])
def test_a_pair_without_a_name_is_refused(pair: str) -> None:
    with pytest.raises(BadInput, match="write it as NAME=VALUE"):
        parse_extra([pair])


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ("a=[1", r"--set a=\[1: the value is no JSON: Expecting"),
        ("a={b}", "the value is no JSON"),
        ("a=NaN", "NaN is no finite number"),
        ("a=[-Infinity]", "-Infinity is no finite number"),
        ("seed=1", "--set seed: --seed sets that"),
        ("return_dict=false", "accel sets that itself"),
        ("a=" + "[" * 100_000, "the value is no JSON"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(pair: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        parse_extra([pair])


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^the prompt 'a \?' holds bytes that are no UTF-8$"):
        read_prompts(["a \udcff"], None)
