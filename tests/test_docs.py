"""What docs/ says holds: its Python runs, its links lead somewhere, the reasons it quotes exist."""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
HOW_IT_WORKS = ROOT / "docs" / "how-it-works.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub makes it up."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def definitions(source: str) -> dict[str, str]:
    """Functions of `source` without docstrings and annotations, by name."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
            found[node.name] = ast.unparse(node)
    return found


def test_how_it_works_runs(device: torch.device) -> None:
    names = {"device": device, "pipe": torch.nn.Linear(2, 2).to(device)}
    said: list[str] = []
    runner = doctest.DocTestRunner()
    for number, block in enumerate(python_blocks(HOW_IT_WORKS), start=1):
        if ">>>" not in block:
            exec(compile(block, f"block {number}", "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, names, f"block {number}", None, 0)
        runner.run(test, out=said.append, clear_globs=False)
        names.update(test.globs)
    assert runner.tries >= 10
    assert "".join(said) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](#one-two) [b](page.md#one-two) [c](gone.md) [d](#three)")
    assert list(broken_links(page)) == ["gone.md", "#three"]


def test_the_figures_show_the_forward_that_the_page_shows() -> None:
    shown = definitions("\n".join(b for b in python_blocks(HOW_IT_WORKS) if ">>>" not in b))
    drawn = definitions((ROOT / "scripts" / "figures" / "example.py").read_text())
    assert shown == {name: drawn[name] for name in ("attend", "forward")}


def test_quoted_reasons_are_those_of_the_report() -> None:
    rooms = [*(ROOT / "accel").glob("*.py"), *(ROOT / "patches").glob("*.py")]
    source = "\n".join(path.read_text() for path in rooms)
    table = HOW_IT_WORKS.read_text().split("| reason | remedy |")[1].split("\n\n")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(quoted) >= 9
    for reason in quoted:
        for part in re.split(r"\d[\dx]*", reason):  # numbers stand for what is filled in
            assert part.strip() in source, reason
