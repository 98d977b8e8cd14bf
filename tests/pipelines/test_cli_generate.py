import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageStat

from accel.pipelines import machine, making, picture

Cli = Callable[..., Any]
Folder = Callable[[str], Path]
SMALL = ("--size", "64", "--steps", "3")


@pytest.fixture
def model(saved: Folder) -> tuple[str, ...]:
    return ("--model", str(saved("sd15")), *SMALL)


def _varies(path: Path) -> bool:
    with Image.open(path) as image:
        return sum(ImageStat.Stat(image).var) > 0


def test_a_prompt_becomes_a_picture(accel_cli: Cli, model: tuple[str, ...], tmp_path: Path) -> None:
    done = accel_cli("generate", "a red circle", *model, "--seed", "3", "-o", "new/circle.png")
    assert (done.code, done.remarks()) == (0, [])
    assert done.out.startswith("new/circle.png: 64x64, seed 3, ")
    assert _varies(tmp_path / "new/circle.png")


def test_a_picture_makes_itself_again(accel_cli: Cli, model: tuple[str, ...]) -> None:
    made = accel_cli(
        *("generate", "a red circle", *model, "--guidance", "2", "--negative-prompt", "blue"),
        *("--set", "guidance_rescale=0.5", "-o", "first.png"),
    )
    again = accel_cli("generate", "--from", "first.png", "-o", "again.png", "--mode", "off")
    other = accel_cli("generate", "--from", "first.png", "-o", "other.png", "--guidance", "3")
    assert [made.code, again.code, other.code] == [0, 0, 0]
    assert again.err == ""
    first, second, third = (Path(f"{n}.png").read_bytes() for n in ("first", "again", "other"))
    assert first == second
    with Image.open("first.png") as one, Image.open("other.png") as two:
        assert one.tobytes() != two.tobytes()
    assert third != first


def test_a_model_that_changed_since_is_noticed(
    accel_cli: Cli, model: tuple[str, ...], copied: Folder
) -> None:
    accel_cli("generate", "x", *model, "-o", "first.png")
    folder = copied("sd15")
    (folder / "scheduler" / "extra.json").write_text("{}", encoding="utf-8")
    again = accel_cli("generate", "--from", "first.png", "--model", folder, "-o", "again.png")
    assert again.code == 0
    (told,) = again.remarks()
    assert told.startswith("accel: the picture was made with model ")


@pytest.fixture
def two_threads() -> Iterator[Callable[[], None]]:
    yield lambda: torch.set_num_threads(2)
    torch.set_num_threads(1)


def test_a_picture_made_on_a_cpu_holds_its_number_of_threads(
    accel_cli: Cli, model: tuple[str, ...], two_threads: Callable[[], None]
) -> None:
    for name, prepare in (("one", lambda: None), ("two", two_threads)):
        prepare()
        done = accel_cli("generate", "x", *model, "--device", "cpu", "-o", f"{name}.png")
        assert done.code == 0
    made = [picture.read_settings(Path(f"{name}.png"))[1] for name in ("one", "two")]
    assert [made_with["threads"] for made_with in made] == [1, 2]
    assert made[0] == {**made[1], "threads": 1}


def test_another_number_of_threads_is_told_in_one_line(
    accel_cli: Cli, model: tuple[str, ...], two_threads: Callable[[], None]
) -> None:
    accel_cli("generate", "x", *model, "--device", "cpu", "-o", "first.png")
    again = ("generate", "--from", "first.png", "--device", "cpu", "--mode", "off", "-o", "x.png")
    assert accel_cli(*again).err == ""
    two_threads()
    done = accel_cli(*again)
    assert (done.code, torch.get_num_threads()) == (0, 2)
    assert done.complaint == (
        "accel: the picture was made with threads 1, here it is 2: it may come out different; "
        "OMP_NUM_THREADS=1 before the command sets that"
    )


@pytest.mark.parametrize(
    ("cores", "remedy"),
    [
        (3, "OMP_NUM_THREADS=4 MKL_DYNAMIC=FALSE before the command sets that"),
        (4, "OMP_NUM_THREADS=4 before the command sets that"),
    ],
)
def test_more_threads_than_cores_need_a_word_to_mkl(
    cores: int,
    remedy: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: cores)
    making._note_differences({"threads": 4}, {"threads": 2})
    assert capsys.readouterr().err.endswith(f"; {remedy}\n")


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
def test_that_remedy_sets_more_threads_than_there_are_cores() -> None:
    wanted = machine.cores() + 1
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads())"],
        env={**os.environ, "OMP_NUM_THREADS": str(wanted), "MKL_DYNAMIC": "FALSE"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{wanted}\n"


def test_threads_are_no_matter_on_a_gpu(
    accel_cli: Cli, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    accel_cli("generate", "x", *model, "--device", "cpu", "-o", "first.png")
    monkeypatch.setattr(machine, "threads", lambda device: None)
    monkeypatch.setattr(machine, "device_name", lambda device: "A GPU")
    again = ("generate", "--from", "first.png", "--mode", "off", "-o", "again.png")
    complaint = accel_cli(*again, "--device", "cpu").complaint
    assert complaint.startswith("accel: the picture was made with device ")
    assert "threads" not in picture.read_settings(Path("again.png"))[1]


def test_json_is_all_there_is_on_stdout(accel_cli: Cli, model: tuple[str, ...]) -> None:
    done = accel_cli(
        *("generate", "red", "blue", *model, "--number", "2", "--seed", "5"),
        *("--output", "{prompt}-{seed}.png", "--json"),
    )
    result = json.loads(done.out)
    made = result["pictures"]
    assert [p["path"] for p in made] == ["red-5.png", "red-6.png", "blue-5.png", "blue-6.png"]
    assert len({p["sha256"] for p in made}) == 4
    assert all(_varies(Path(p["path"])) for p in made)
    assert made[0]["settings"]["guidance"] == 7.5
    assert made[0]["settings"]["dtype"] == "float32"
    assert result["made_with"]["scheduler"] == "DDIMScheduler"


def test_a_picture_does_not_depend_on_its_neighbours(
    accel_cli: Cli, model: tuple[str, ...]
) -> None:
    accel_cli("generate", "a", "b", *model, "--seed", "1", "-n", "2", "-o", "{prompt}{seed}.png")
    accel_cli("generate", "b", *model, "--seed", "2", "-o", "alone.png")
    assert Path("alone.png").read_bytes() == Path("b2.png").read_bytes()


def test_a_sentence_without_quotes_gets_a_hint(accel_cli: Cli, model: tuple[str, ...]) -> None:
    done = accel_cli("generate", "red", "circle", *model, "-o", "{index}.png")
    assert done.code == 0
    assert done.remarks() == [
        "accel: 2 prompts of one word each: quotes make a sentence one prompt"
    ]


def test_two_prompts_make_two_pictures_in_a_new_folder(
    accel_cli: Cli, model: tuple[str, ...]
) -> None:
    done = accel_cli("generate", "a red", "blue", *model, "--seed", "1", "-o", "new/pictures/")
    assert (done.code, done.remarks()) == (0, [])
    made = sorted(path.name for path in Path("new/pictures").iterdir())
    assert made == ["0-a-red-1.png", "1-blue-1.png"]


def test_prompts_come_from_a_file(accel_cli: Cli, model: tuple[str, ...]) -> None:
    Path("prompts.txt").write_text("\none\n\n  \ntwo\n", encoding="utf-8")
    done = accel_cli("generate", "--prompts", "prompts.txt", *model, "-o", "{index}.png")
    assert done.code == 0
    assert _varies(Path("0.png")) and _varies(Path("1.png"))
    assert not Path("2.png").exists()


@pytest.mark.parametrize("name", ["flux", "zimage", "qwenimage", "sdxl"])
def test_other_pipelines_are_asked_in_their_own_words(
    accel_cli: Cli, saved: Folder, name: str
) -> None:
    done = accel_cli("generate", "x", "--model", saved(name), *SMALL, "-o", "x.png", "--json")
    assert done.code == 0, done.err
    assert _varies(Path("x.png"))


def test_guidance_reaches_the_argument_that_guides(accel_cli: Cli, saved: Folder) -> None:
    for scale in ("1", "6"):
        done = accel_cli(
            *("generate", "x", "--model", saved("qwenimage"), *SMALL, "--seed", "1"),
            *("--guidance", scale, "--negative-prompt", "y", "-o", f"{scale}.png"),
        )
        assert done.code == 0, done.err
    with Image.open("1.png") as weak, Image.open("6.png") as strong:
        assert weak.tobytes() != strong.tobytes()


BAD = {
    "no such folder": (["--model", "nowhere"], "no such model folder: nowhere"),
    "no prompt file": (["--prompts", "missing"], "prompts come as arguments or from --prompts"),
    "no pattern": (["--output", "{x}.png"], "no {x} here"),
    "one path": (["--number", "2", "-o", "x.png"], "put {index} into the name"),
    "unwritable": (["--output", "file/x.png"], "cannot write in "),
    "wrong size": (["--size", "64by64"], "a size is 512 or 768x512"),
    "indivisible": (
        ["--size", "63x66"],
        "accel: --size 63x66: width and height have to be multiples of 8: 64x64, say",
    ),
    "no step": (["--steps", "0"], "accel: --steps 0: this has to be at least 1"),
    "no picture": (["-n", "0"], "accel: --number 0: this has to be at least 1"),
    "a slip": (["--number", "100000000"], "--number 100000000: this has to be at most 100000"),
    "endless steps": (["--steps", "100000000"], "--steps 100000000: this has to be at most"),
    "no such seed": (["--seed", "-1"], "accel: --seed -1: this has to be at least 0"),
    "guidance of none": (["--guidance", "nan"], "--guidance nan: this has to be a finite"),
    "endless guidance": (["--guidance", "inf"], "--guidance inf: this has to be a finite"),
    "a word for a seed": (["--seed", "two"], "accel: --seed two: this has to be a whole number"),
    "a word for a number": (["--guidance", "a"], "accel: --guidance a: this has to be a number"),
    "two lines for a seed": (["--seed", "1\n2"], "--seed 1 2: this has to be a whole number"),
    "empty size": (["--size", ""], "a size is 512 or 768x512"),
    "no name": (["-o", ""], 'accel: --output "": a .png, a folder or a pattern is wanted'),
    "no folder": (["-o", "pictures"], "write pictures/ for a folder"),
    "a zoo's name": (["--model", "sdxl"], "sdxl has random weights: accel bench, verify"),
    "no such dtype": (["--dtype", "int3"], "choose from auto, float32"),
    "no such device": (["--device", "abacus"], "--device abacus: no such device"),
    "another device": (["--device", "meta"], "pipelines run on cpu and cuda"),
    "no such mode": (["--mode", "warp"], "choose from exact, off"),
    "no such option": (["--warp"], "No such option"),
    "no such argument": (["--set", "warp=9"], "takes no warp; it takes timesteps, sigmas, "),
    "misspelt argument": (["--set", "clipskip=1"], "takes no clipskip; did you mean clip_skip?"),
    "no number": (["--set", "guidance_rescale=x"], "guidance_rescale takes a finite number"),
    "no whole number": (["--set", "clip_skip=1.5"], "--set clip_skip=1.5: clip_skip takes a whole"),
    "no JSON": (["--set", "sigmas=[1"], "--set sigmas=[1: the value is no JSON: "),
    "a tensor": (["--set", "latents=1"], "latents takes nothing that can be written here"),
    "has an option": (["--set", "width=64"], "--set width: --size sets that"),
    "guidance again": (["--set", "guidance_scale=1"], "--set guidance_scale: --guidance sets that"),
    "ours": (["--set", "output_type=np"], "--set output_type: accel sets that itself"),
    "no text": (["--negative-prompt", "\udcff"], "--negative-prompt '?' holds bytes that are no"),
    "several": (["--set", "num_images_per_prompt=2"], "--number makes several pictures"),
    "no lora": (["--lora", "missing.safetensors:0.5"], "--lora missing.safetensors: no such file"),
    "no lora folder": (["--lora", "missing:0.5"], "--lora missing: no such file"),
    "no source": (["--from", "missing.png"], "no picture can be read there"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(accel_cli: Cli, model: tuple[str, ...], case: str) -> None:
    arguments, words = BAD[case]
    Path("file").write_text("", encoding="utf-8")
    done = accel_cli("generate", "x", *model, *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.complaint
    assert done.complaint.startswith("accel: ")
    assert not list(Path().rglob("*.png"))


def test_no_prompt_is_one_line(accel_cli: Cli) -> None:
    done = accel_cli("generate")
    assert done.code == 2
    assert done.complaint.startswith("accel: no prompt: ")


def test_cuda_where_there_is_none_is_one_line(
    accel_cli: Cli, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = accel_cli("generate", "x", *model, "--device", "cuda")
    assert done.code == 2
    assert done.complaint.startswith("accel: --device cuda: torch ")


def test_a_folder_that_is_no_pipeline_is_one_line(accel_cli: Cli, saved: Folder) -> None:
    done = accel_cli("generate", "x", "--model", saved("sd15") / "vae")
    assert done.code == 2
    assert "is no pipeline" in done.complaint


def test_broken_weights_are_one_line(accel_cli: Cli, copied: Folder) -> None:
    folder = copied("sd15")
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"nothing")
    done = accel_cli("generate", "x", "--model", folder, *SMALL)
    assert done.code == 2
    (told,) = done.remarks()
    assert "cannot be loaded: " in told


def test_pickle_weights_load_when_asked_for(
    accel_cli: Cli, copied: Folder, model: tuple[str, ...]
) -> None:
    from safetensors.torch import load_file

    folder = copied("sd15")
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    arguments = ("generate", "x", "--model", folder, *SMALL, "--seed", "1", "-o", "pickled.png")
    refused = accel_cli(*arguments)
    assert refused.code == 2
    assert "allow it with --trust-pickle" in refused.complaint
    assert accel_cli(*arguments, "--trust-pickle").code == 0
    accel_cli("generate", "x", *model, "--seed", "1", "-o", "plain.png")
    with Image.open("pickled.png") as one, Image.open("plain.png") as two:
        assert one.tobytes() == two.tobytes()


def test_out_of_memory_says_what_to_lower(
    accel_cli: Cli, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nAnd more.")

    monkeypatch.setattr("diffusers.UNet2DConditionModel.forward", full)
    done = accel_cli("generate", "x", *model)
    assert done.code == 1
    (told,) = done.remarks()
    assert "Tried to allocate 9 GiB" in told
    assert "lower --size" in told


def test_an_unexpected_error_is_one_line_and_a_traceback_with_debug(
    accel_cli: Cli, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("one\ntwo")

    monkeypatch.setattr("diffusers.UNet2DConditionModel.forward", broken)
    done = accel_cli("generate", "x", *model)
    assert done.code == 1
    assert done.remarks() == ["accel: RuntimeError: one (--debug shows the traceback)"]
    assert "Traceback" in accel_cli("generate", "x", *model, "--debug").err


def test_ctrl_c_ends_quietly(
    accel_cli: Cli, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("diffusers.UNet2DConditionModel.forward", interrupted)
    done = accel_cli("generate", "x", *model)
    assert (done.code, done.remarks()) == (130, ["accel: interrupted"])


def test_sizes_are_refused_or_rounded_as_the_model_does(accel_cli: Cli, saved: Folder) -> None:
    size = ("--size", "66x64", "--steps", "2", "-o", "x.png")
    refused = accel_cli("generate", "x", "--model", saved("zimage"), *size)
    assert refused.code == 2
    assert "Width must be divisible by " in refused.complaint
    assert refused.complaint.endswith("; --size sets it")
    rounded = accel_cli("generate", "x", "--model", saved("flux"), *size)
    assert rounded.code == 0
    assert rounded.remarks() == ["accel: 66x64 asked for, but the model made 64x64"]


def test_a_video_model_is_refused(accel_cli: Cli, saved: Folder) -> None:
    done = accel_cli("generate", "x", "--model", saved("wan"), "-o", "x.png")
    assert done.code == 2
    assert "makes videos; accel generate makes pictures" in done.complaint
    assert not Path("x.png").exists()
