import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import accel
from accel.pipelines import plotting

Cli = Callable[..., Any]
Folder = Callable[[str], Path]
SMALL = ("--size", "64", "--steps", "3", "--device", "cpu")


@pytest.fixture
def model(saved: Folder) -> tuple[str, ...]:
    return (str(saved("sd15")), *SMALL)


def test_verify_compares_latents_and_bytes(accel_cli: Cli, model: tuple[str, ...]) -> None:
    done = accel_cli("verify", *model, "--runs", "2", "--json")
    result = json.loads(done.out)
    assert (done.code, done.remarks("cpu")) == (0, [])
    runs = [check["run"] for check in result["checks"]]
    assert runs == ["eager again", "patched, run 1", "patched, run 2", "eager after unpatch"]
    assert all(c["latents_equal"] and c["pictures_equal"] for c in result["checks"])
    assert all(c["pixel_variance"] > 0 for c in result["checks"])


def test_verify_says_that_nothing_was_accelerated(accel_cli: Cli, model: tuple[str, ...]) -> None:
    done = accel_cli("verify", *model, "--runs", "1")
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith("equal, trivially: nothing was accelerated (")


def _patched_badly(monkeypatch: pytest.MonkeyPatch, worsen: Callable[[Any], Any]) -> None:
    """Makes `accel.patch` install, on top, a forward that returns something worse."""
    from accel.patches import pipeline

    def patch(pipe: Any, **options: Any) -> Any:
        pipeline.patch(pipe, **options)
        plain = pipe.unet.forward
        pipe.unet.forward = lambda *a, **k: worsen(plain(*a, **k))
        return pipe

    def unpatch(pipe: Any) -> Any:
        del pipe.unet.forward
        return pipeline.unpatch(pipe)

    monkeypatch.setattr(accel, "patch", patch, raising=False)
    monkeypatch.setattr(accel, "unpatch", unpatch, raising=False)


def test_verify_finds_a_difference(
    accel_cli: Cli, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _patched_badly(monkeypatch, lambda output: (output[0] * 1.001,))
    done = accel_cli("verify", *model, "--runs", "1", "--json")
    result = json.loads(done.out)
    assert (done.code, result["equal"]) == (1, False)
    assert [check["equal"] for check in result["checks"]] == [True, False, True]
    assert result["verdict"].startswith("differs: patched, run 1 (latents, largest difference")


def test_verify_takes_no_proof_from_numbers_that_are_none(
    accel_cli: Cli, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _patched_badly(monkeypatch, lambda output: (output[0] * torch.nan,))
    done = accel_cli("verify", *model, "--runs", "1")
    assert done.code == 1
    assert "proves nothing: patched, run 1 gave latents that are not finite" in done.out


def test_verify_tells_a_pipeline_that_differs_from_itself(
    accel_cli: Cli, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import UNet2DConditionModel

    plain, calls = UNet2DConditionModel.forward, iter(range(1000))

    def drifting(self: Any, *arguments: Any, **options: Any) -> Any:
        output = plain(self, *arguments, **options)
        return (output[0] + 1e-3 * next(calls),)

    monkeypatch.setattr(UNet2DConditionModel, "forward", drifting)
    done = accel_cli("verify", *model, "--runs", "1")
    assert done.code == 1
    assert "not because of accel: two eager runs of one seed already differ" in done.out


def test_explain_says_why_nothing_is_accelerated(
    accel_cli: Cli, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = accel_cli("explain", *model, "--runs", "1")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("nothing is accelerated: ")
    result = json.loads(accel_cli("explain", *model, "--runs", "1", "--json").out)
    assert result["report"]["inactive"]


def test_bench_measures_and_compares(accel_cli: Cli, model: tuple[str, ...]) -> None:
    done = accel_cli(
        *("bench", *model, "a blue square", "--repeats", "2", "--json"),
        *("--output", "deep/result.json", "--plot", "plot.png"),
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert json.loads(Path("deep/result.json").read_text(encoding="utf-8")) == result
    assert result["settings"]["prompt"] == "a blue square"
    assert result["pictures_equal"] and result["latents_equal"] and result["proven"]
    assert result["pixel_variance"] > 0
    for way in ("eager", "patched"):
        assert len(result[way]["seconds"]) == 2
        assert 0 < result[way]["median_s"] <= max(result[way]["seconds"])
        assert result[way]["step_ms"] > 0
    assert result["ratio"] is None and result["inactive"]
    assert result["patched"]["setup_s"] is None and result["patched"]["first_s"] is None
    assert {"date", "command", "versions", "device", "processor"} <= result.keys()
    with Image.open("plot.png") as plot:
        assert len(plot.convert("RGB").getcolors(1 << 24) or []) > 10


def test_bench_fails_where_pictures_differ(
    accel_cli: Cli, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _patched_badly(monkeypatch, lambda output: (output[0] * 0.5,))
    done = accel_cli("bench", *model, "--repeats", "1")
    assert done.code == 1
    assert "PNG bytes of all pictures: DIFFERENT; latents: DIFFERENT" in done.out


@pytest.mark.parametrize("command", ["bench", "verify", "explain"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), "accel: no such model folder: nowhere; the zoo has zimage, "),
        (("",), "accel: no such model folder: ; the zoo has zimage, "),
        (("a" * 300,), "aaa; the zoo has zimage, "),
        (("{folder}", "--steps", "100000000"), "--steps 100000000: this has to be at most 100000"),
        (("{folder}", "--output", "a" * 300), "aaa: cannot write in "),
        (("{folder}", "--lora", "a" * 300), "aaa: no such file"),
        (("{folder}", "--lora", ""), "--lora : no such file"),
        (("{folder}/vae",), "is no pipeline"),
        (("{folder}", "--output", "file/result.json"), "--output file/result.json: cannot write"),
        (("{folder}", "--capture", "never"), "--capture never: choose from auto, always"),
        (("{folder}", "--set", "warp=9"), "takes no warp"),
    ],
)
def test_bad_input_is_one_clear_line(
    accel_cli: Cli, saved: Folder, command: str, arguments: tuple[str, ...], words: str
) -> None:
    Path("file").write_text("", encoding="utf-8")
    done = accel_cli(command, *(a.replace("{folder}", str(saved("sd15"))) for a in arguments))
    assert (done.code, done.out) == (2, "")
    assert words in done.complaint


def test_a_plot_is_checked_before_the_work(accel_cli: Cli, model: tuple[str, ...]) -> None:
    done = accel_cli("bench", *model, "--plot", "plot.txt")
    assert done.code == 2
    assert done.complaint == "accel: --plot plot.txt: a plot ends in .png, .svg, .pdf"


def test_a_title_names_what_was_measured() -> None:
    settings = {"width": None, "steps": None, "dtype": "float32"}
    result = {"model": "m", "device": "d", "settings": settings}
    assert plotting.title(result) == "m, float32, d"


def test_frames_of_a_video_are_compared(accel_cli: Cli, saved: Folder) -> None:
    done = accel_cli("verify", saved("wan"), *SMALL, "--set", "num_frames=5", "--runs", "1")
    assert done.code == 0, done.err
    assert "equal" in done.out
