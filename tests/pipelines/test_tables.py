from pathlib import Path
from typing import Any

import pytest

from accel.patches.overview import Report
from accel.pipelines import plotting, tables
from accel.reporting import BreakReport, GraphReport, PartReport


def test_an_explanation_names_every_break_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    part = PartReport("unet", "UNet2DConditionModel", captures=1, replays=7, recaptures=3)
    part.eager("first call of the module")
    part.guard_misses, part.evictions = 4, 2
    break_ = BreakReport("model.py:12 [forward]", "aten.item", "automatic", guarded=True)
    part.graphs.append(GraphReport("1x4x8x8", 2, 310, 0.1, 2**20, 7, [break_]))
    declined = PartReport("vae", "AutoencoderKL", declined="the GPU is the bottleneck: 92 %")
    report = Report([part, declined], pool_bytes=3 * 2**30)
    tables.print_explanation({"report": report.to_dict()})
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "UNet2D" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["unet", "UNet2DConditionModel", "1", "3", "7", "1", "2", "1"]
    assert "unet: automatic break at model.py:12 [forward]: aten.item, guarded\n" in out
    assert "unet: replays given up, since something had changed: 4\n" in out
    assert "unet: graphs given up for memory: 2\n" in out
    assert "unet: eager x1: first call of the module\n" in out
    assert "vae: declined: the GPU is the bottleneck: 92 %\n" in out
    assert "memory of the graphs: 3.00 GiB\n" in out


def _benched(**changes: Any) -> dict[str, Any]:
    side = {
        "median_s": 1.0,
        "seconds": [1.0],
        "step_ms": None,
        "warm_up_s": [2.0],
        "peak_bytes": 2**30,
        "reserved_bytes": None,
    }
    return {
        "model": "m",
        "device": "a device whose name is longer than the table is wide",
        "settings": {"dtype": "float32"},
        "eager": side,
        "patched": {**side, "first_s": 2.0, "setup_s": 1.0},
        "ratio": 2.5,
        "pixel_variance": 3.0,
        "latents_equal": True,
        "pictures_equal": True,
        "inactive": None,
        **changes,
    }


def test_a_flat_picture_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_bench(_benched(pixel_variance=0.0))
    out = capsys.readouterr().out
    assert "pictures: flat, so their equality proves nothing\n" in out
    assert out.startswith("m, float32, a device whose name is longer than the table is wide\n")
    assert "1.00 GiB" in out


def test_a_benchmark_ends_with_its_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_bench(_benched())
    out = capsys.readouterr().out
    assert "eager / patched: 2.50\n" in out
    assert "not accelerated" not in out


def test_where_nothing_was_accelerated_there_is_a_reason_and_no_ratio(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables.print_bench(_benched(ratio=None, inactive="no CUDA device"))
    out = capsys.readouterr().out
    assert "not accelerated here: no CUDA device\n" in out
    assert "eager / patched" not in out


def test_where_nothing_was_patched_only_eager_figures_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    patched = {**_benched()["patched"], "median_s": 77.0, "first_s": None, "setup_s": None}
    tables.print_bench(_benched(ratio=None, inactive="no CUDA device", patched=patched))
    out = capsys.readouterr().out
    head, *_ = [line for line in out.splitlines() if "eager" in line]
    assert head.strip("┃").split() == ["┃", "eager"]
    (said,) = [line for line in out.splitlines() if "patched" in line]
    assert said.startswith("nothing is patched, so all figures are eager ones; not accelerated")
    assert "set-up" not in out and "77" not in out


def test_a_benchmark_shows_both_ways_and_the_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    patched = {**_benched()["patched"], "median_s": 0.4, "setup_s": 1.7, "warm_up_s": [2.1, 0.4]}
    tables.print_bench(_benched(patched=patched))
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    assert rows == [
        ["median picture", "1.000 s", "0.400 s"],
        ["step", "-", "-"],
        ["first picture", "2.000 s", "2.100 s"],
        ["set-up", "", "1.700 s"],
        ["peak memory", "1.00 GiB", "1.00 GiB"],
        ["reserved memory", "-", "-"],
    ]


def test_a_plot_has_the_ratio_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is nothing patched to draw."""
    from matplotlib.axes import Axes

    titles: list[str] = []
    ways: list[list[str]] = []
    monkeypatch.setattr(Axes, "set_yticks", lambda self, places, labels: ways.append(labels))
    monkeypatch.setattr(Axes, "set_title", lambda self, text, **options: titles.append(text))
    for result in (_benched(), _benched(ratio=None, inactive="no CUDA device")):
        plotting.draw(result, tmp_path / "plot.png")
    assert [title.rpartition(": ")[2] for title in titles] == ["2.50x", "not accelerated here"]
    assert ways == [["patched", "eager"], ["eager"]]
