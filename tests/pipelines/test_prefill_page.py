"""What the page on prefill says was measured stands in the files that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
WAYS = ("transformers", "no graphs", "breakable", "full")
RATIOS = ("full, times transformers", "full, times no graphs")


def _section(heading: str) -> str:
    page = (DOCS / "prefill.md").read_text(encoding="utf-8")
    return page.partition(f"### {heading}")[2].partition("\n##")[0]


def _rows(heading: str) -> Iterator[list[str]]:
    lines = re.findall(r"^\| (.*) \|$", _section(heading), re.MULTILINE)
    for line in lines[1:]:
        yield [cell.strip() for cell in line.split("|")]


def _file(link: str) -> dict[str, Any]:
    (path,) = re.findall(r"\((benchmarks/[^)]+)\)", link)
    content: dict[str, Any] = json.loads((DOCS / path).read_text(encoding="utf-8"))
    return content


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))


def _is(cell: str, value: float | None) -> bool:
    if value is None:
        return cell == ""
    digits = len(cell.partition(".")[2])
    return _number(cell) == pytest.approx(value, abs=0.5001 * 10**-digits)


@pytest.mark.parametrize(
    ("heading", "named", "least"),
    [
        ("How long does one prompt take?", ["tokens"], 15),
        ("What do mixtures of experts", ["model", "tokens"], 19),
    ],
)
def test_times_are_those_of_their_files(heading: str, named: list[str], least: int) -> None:
    rows = list(_rows(heading))
    assert len(rows) >= least
    for row in rows:
        tokens, cells = row[len(named) - 1], row[len(named) : -1]
        (found,) = [r for r in _file(row[-1])["rows"] if r["tokens"] == _number(tokens)]
        values = [found.get(f"{way}, ms") for way in WAYS]
        if "model" in named:
            values.append(found["breakdown"]["full"]["device busy, ms"])
        values += [found[ratio] for ratio in RATIOS]
        assert all(map(_is, cells, values)) and len(cells) == len(values), row


def test_fewer_kernels_are_timed_as_the_files_say() -> None:
    names = ("-own-norms", "", "-rotary", "-kernels", "-norms")
    files = [_file(f"(benchmarks/prefill-qwen3-4b{name}.json)")["rows"] for name in names]
    for tokens, *cells in _rows("What do fewer kernels bring?"):
        for cell, rows in zip(cells, files, strict=True):
            found = [r["full, ms"] for r in rows if r["tokens"] == _number(tokens)]
            assert _is(cell, found[0] if found else None), (tokens, cells)


def test_modes_agree_in_as_many_batches_as_the_files_have() -> None:
    for _, _, batches, equal, link in _rows("Do the modes agree bit for bit?"):
        checks = _file(link)["check"]
        compared = [v for c in checks for name, v in c.items() if name.endswith("= no graphs")]
        assert (len(checks), equal) == (int(batches), "all")
        assert compared and all(compared)


def test_a_commit_is_the_one_that_the_file_holds() -> None:
    page = (DOCS / "prefill.md").read_text(encoding="utf-8")
    links = re.findall(r"\[([0-9a-f]{7})\]\((benchmarks/[^)]+)\)", page)
    held = {(said, _file(f"({path})").get("commit")) for said, path in links}
    assert {said == commit for said, commit in held if commit is not None} == {True}


def test_the_built_in_model_has_as_many_entries_and_logits_as_the_page_says() -> None:
    from accel.pipelines.demo_lm import load_demo_lm

    model, tokenizer = load_demo_lm()
    page = (DOCS / "prefill.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"tokenizer\s+of (\d+) entries \(logits have (\d+)", page)
    assert said == (str(len(tokenizer)), str(model.lm_head.out_features))
