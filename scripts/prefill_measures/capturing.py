"""Seconds and memory for all graphs of a runner, and lines of code behind graphs and compiler."""

from __future__ import annotations

import ast
import gc
import time
from pathlib import Path
from typing import Any

import torch

import accel
import accel.patches
from accel.pipelines.machine import synchronize
from prefill_measures.ways import Options


def captures(model: Any, mode: str, options: Options) -> dict[str, Any]:
    """Capturing the whole ladder twice, by a new runner each: the first has kernels to load."""
    device, seconds = model.device, []
    for _ in range(2):
        gc.collect()
        with options.runner(model, mode) as runner:
            synchronize(device)
            begin = time.perf_counter()
            runner.capture()
            synchronize(device)
            seconds.append(time.perf_counter() - begin)
            report = runner.report
            parts = {
                "pool": report.pool_bytes,
                "hidden states": report.output_bytes,
                "batch tensors": report.buffer_bytes,
                "attention workspace": report.workspace_bytes,
            }
            figures = {
                "mode": report.mode,
                "attention": report.attention,
                "graphs": len(report.buckets),
                "buckets": sorted(bucket.bucket for bucket in report.buckets),
                "segments each": max((b.segments for b in report.buckets), default=0),
                "memory, MiB": {name: nbytes / 2**20 for name, nbytes in parts.items()},
                "notes": list(report.notes),
            }
    return {"seconds, first": seconds[0], "seconds, again": seconds[1], **figures}


def code_behind_each() -> dict[str, int]:
    """Lines of code of each path, without blank lines, comments and docstrings."""
    rooms = Path(accel.__file__).parent
    patches = Path(accel.patches.__file__).parent
    library = Path(torch.__file__).parent
    needed = [patches / name for name in ("llm.py", "attention.py", "state.py")]
    return {
        "graphs: engine": _lines(rooms.glob("*.py")),
        "graphs: prefill": _lines((rooms / "prefill").glob("*.py")),
        "graphs: transformers adapter": _lines(needed),
        "compiler: what a caller writes": _lines([Path(__file__).with_name("piecewise.py")]),
        **{
            f"compiler: torch.{room}": _lines((library / room).rglob("*.py"))
            for room in ("_dynamo", "_functorch", "_inductor")
        },
    }


def _lines(paths: Any) -> int:
    return sum(map(lines_of_code, paths))


def lines_of_code(path: Path) -> int:
    """Lines of a Python file that are not blank, comment or docstring."""
    text = path.read_text(encoding="utf-8")
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    told: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for statement in node.body if isinstance(node, described) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                told.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(1 for n, line in lines if line and line[0] != "#" and n not in told)
