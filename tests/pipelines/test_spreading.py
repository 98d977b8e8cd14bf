"""Two and more processes that a launcher starts, against one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.pipelines import demo, spreading
from accel.pipelines.errors import BadInput

Cli = Callable[..., Any]

PROMPTS = ("a red circle", "a green square", "a navy ball", "a yellow star on a black background")

VARIABLES = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}

# The command line with another maker of pictures: what is told and in which order, who stops when,
# needs no model.
MAKER = """
import os, sys, time
from accel.pipelines import cli, making

def prepared(order, plan, team):
    share = team.share([*zip(plan.wanted, plan.paths)])
    return making.Prepared(None, share, {}) if share else None

def write_one(ready, settings, path, on_step):
    if settings.prompt == "broken":
        raise RuntimeError("one\\ntwo")
    time.sleep(0.1 * ("slow" in settings.prompt))
    path.write_text(os.environ["RANK"])
    return {"path": str(path), "width": 1, "height": 1, "seconds": 0, "settings": {"seed": 0}}

making._prepared, making._write_one = prepared, write_one
making._report = lambda pipe, mode: None
sys.exit(cli.main())
"""


@dataclass(frozen=True)
class Ended:
    """How a launch ended. A launcher adds much of its own on stderr."""

    code: int
    out: list[str]
    err: str

    @property
    def complaints(self) -> list[str]:
        """What the command line itself said there."""
        return [line for line in self.err.splitlines() if line.startswith("accel: ")]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Runs `accelerate launch`; each process has one thread, so that their pictures are one's."""
    monkeypatch.chdir(tmp_path)
    # --multi_gpu only means several processes here: --cpu starts one, whatever --num_processes.
    launcher = ("accelerate.commands.launch", "--multi_gpu", "--num_machines", "1")
    port = ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}

    def run(processes: int, *arguments: str | Path, stdin: str = "") -> Ended:
        done = subprocess.run(
            [sys.executable, "-m", *launcher, *port, "--num_processes", str(processes)]
            + [str(argument) for argument in arguments],
            input=stdin,
            env={**kept, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        return Ended(done.returncode, done.stdout.splitlines(), done.stderr)

    return run


@pytest.fixture
def maker(tmp_path: Path) -> Path:
    """A script that is the command line with a maker of pictures that needs no model."""
    script = tmp_path / "maker.py"
    script.write_text(MAKER, encoding="utf-8")
    return script


def _made(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _two_make_what_one_makes(accel_cli: Cli, launch: Callable[..., Ended], device: str) -> None:
    Path("prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    order = ("generate", "--prompts", "prompts.txt", "--steps", "2", "--seed", "7", "--json")
    two = launch(2, "-m", "accel.pipelines.cli", *order, "-o", "two/", "--device", device)
    assert two.code == 0, two.err
    one = accel_cli(*order, "-o", "one/", "--device", device)
    assert len(_made("one")) == len(PROMPTS)
    assert _made("one") == _made("two")
    told, expected = json.loads("\n".join(two.out)), json.loads(one.out)
    for name in ("sha256", "settings"):
        assert [p[name] for p in told["pictures"]] == [p[name] for p in expected["pictures"]]
    assert told["made_with"] == expected["made_with"]
    assert [line for line in two.complaints if "thread" not in line] == one.err.splitlines()
    assert any("navy" in line for line in one.remarks(device))


needs_weights = pytest.mark.skipif(
    not Path(demo.__file__).with_name("model").is_dir(), reason="the demo's weights are missing"
)


@needs_weights
def test_two_processes_make_the_files_that_one_makes(
    accel_cli: Cli, launch: Callable[..., Ended]
) -> None:
    _two_make_what_one_makes(accel_cli, launch, "cpu")


@needs_weights
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_make_the_files_that_one_makes(
    accel_cli: Cli, launch: Callable[..., Ended]
) -> None:
    _two_make_what_one_makes(accel_cli, launch, "cuda")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompts", "missing.txt"), "--prompts missing.txt: cannot be read: No such file"),
        (("--warp",), "No such option: --warp"),
    ],
)
def test_bad_input_is_one_line_of_all_processes(
    launch: Callable[..., Ended], arguments: tuple[str, ...], words: str
) -> None:
    ended = launch(2, "-m", "accel.pipelines.cli", "generate", *arguments, "--device", "cpu")
    assert ended.code != 0
    (complaint,) = (line for line in ended.complaints if "thread" not in line)
    assert complaint.startswith(f"accel: {words}")
    assert not list(Path().rglob("*.png"))


def test_prompts_from_stdin_are_read_once_and_idle_processes_end_well(
    launch: Callable[..., Ended], maker: Path
) -> None:
    order = ("generate", "--prompts", "-", "--device", "cpu", "-o", "{prompt}.png")
    ended = launch(3, maker, *order, stdin="one\ntwo\n")
    assert ended.code == 0, ended.err
    assert ended.out == ["one.png: 1x1, seed 0, 0.00 s", "two.png: 1x1, seed 0, 0.00 s"]
    assert [Path(f"{name}.png").read_text() for name in ("one", "two")] == ["0", "1"]


def test_what_fails_in_one_process_ends_all_with_one_line(
    launch: Callable[..., Ended], maker: Path
) -> None:
    prompts = [f"slow {index}" for index in range(50)] + ["good", "broken"] + ["after"] * 48
    Path("prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    order = ("generate", "--prompts", "prompts.txt", "--device", "cpu", "-o", "out/{index}.png")
    Path("out").mkdir()
    ended = launch(2, maker, *order)
    assert ended.code != 0
    (complaint,) = (line for line in ended.complaints if "thread" not in line)
    assert complaint == "accel: RuntimeError: one (--debug shows the traceback)"
    made = sorted(int(path.stem) for path in Path("out").iterdir())
    assert [line.partition(":")[0] for line in ended.out] == [f"out/{n}.png" for n in made]
    assert made[-1] == 50  # the other process's only one
    assert 1 <= len(made) < 40


@pytest.mark.parametrize("missing", VARIABLES)
def test_a_part_of_a_launchers_message_is_none(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert not spreading.is_main()
    monkeypatch.delenv(missing)
    with spreading.team("auto") as team:
        assert team is spreading.ALONE
    assert spreading.is_main()


def test_a_launch_of_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**VARIABLES, "WORLD_SIZE": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with spreading.team("auto") as team:
        assert team is spreading.ALONE


def test_without_a_launcher_nothing_heavy_is_imported() -> None:
    lines = (
        "import sys; from accel.pipelines import cli, spreading",
        "with spreading.team('auto'): sys.exit(bool({'torch', 'accelerate'} & set(sys.modules)))",
    )
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], env=kept).returncode == 0


def _launched(device: str) -> spreading.Launched:
    state = SimpleNamespace(num_processes=2, is_main_process=False, device=torch.device(device))
    return spreading.Launched(state, torch.distributed.HashStore())


def test_each_process_takes_the_gpu_of_its_place() -> None:
    second = _launched("cuda:1")
    assert [second.device(asked) for asked in ("auto", "cuda")] == ["cuda:1", "cuda:1"]
    assert _launched("cpu").device("auto") == "cpu"


def test_what_is_no_gpu_stays_as_it_was_asked_for() -> None:
    assert _launched("cpu").device("cuda") == "cuda"  # refused when the model is loaded
    assert _launched("cuda:1").device("cpu") == "cpu"


def test_one_gpu_for_several_processes_is_refused() -> None:
    with pytest.raises(BadInput, match="--device cuda:0: 2 processes take a GPU each"):
        _launched("cuda:1").device("cuda:0")
