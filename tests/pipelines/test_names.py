"""A name that does not exist is answered with the nearest that does, wherever names are listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accel.pipelines import tiny, zoo, zoo_language
from accel.pipelines.names import instead

Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("ful", "full"), ("FULL", "full"), ("breakabel", "breakable"), (" eager", "eager")],
)
def test_the_nearest_name_is_named(name: str, meant: str) -> None:
    known = ["breakable", "full", "eager"]
    assert instead(name, known, "choose") == f"did you mean {meant}?"


def test_where_nothing_is_near_the_other_words_stand() -> None:
    assert instead("warp", ["exact", "off"], "choose from exact, off") == "choose from exact, off"


@pytest.mark.parametrize("name", ["gpu", "GPU"])
def test_another_word_for_a_name_means_that_name(name: str) -> None:
    assert instead(name, ["auto", "cpu", "cuda"], "choose") == "did you mean cuda?"
    assert instead(name, ["auto", "cpu"], "choose") == "did you mean cpu?", "there is no cuda"


def test_several_that_are_as_near_are_all_named() -> None:
    assert instead("sd5", ["sd15", "sd35", "flux"], "") == "did you mean sd35 or sd15?"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "sd16"), "no such model folder: sd16; did you mean sd15?"),
        (("verify", "SDXL"), "no such model folder: SDXL; did you mean sdxl?"),
        (("explain", "z-image"), "no such model folder: z-image; did you mean zimage"),
        (("bench", "dmeo"), "no such model folder: dmeo; did you mean demo?"),
        (("generate", "x", "-m", "dmeo"), "no such model folder: dmeo; did you mean demo?"),
        (("prefill", "x", "-m", "deme"), "no such model folder: deme; did you mean demo?"),
        (("generate", "x", "--mode", "exakt"), "--mode exakt: did you mean exact?"),
        (("prefill", "x", "--mode", "fulll"), "--mode fulll: did you mean full?"),
        (("prefill", "x", "--attention", "touch"), "--attention touch: did you mean torch?"),
        (("bench", "demo", "--capture", "alway"), "--capture alway: did you mean always?"),
        (("generate", "x", "--dtype", "bf16"), "--dtype bf16: did you mean bfloat16?"),
        (("generate", "x", "--device", "cdua"), "--device cdua: did you mean cuda?"),
        (("generate", "x", "--device", "gpu"), "--device gpu: did you mean cuda?"),
        (("generate", "x", "-o", "{promt}.png"), "no {promt} here; did you mean {prompt}?"),
        (("bnech", "demo"), "No such command 'bnech'. Did you mean 'bench'?"),
        (("bench", "demo", "--repeat", "2"), "No such option: --repeat"),
    ],
)
def test_every_list_of_the_command_line_is_asked(
    accel_cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    done = accel_cli(*arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.complaint


def test_every_list_of_models_in_python_is_asked() -> None:
    for ask, wrong, meant in (
        (zoo.defaults, "sd16", "sd15"),
        (tiny.pipeline, "sd16", "sd15"),
        (zoo_language.parameter_count, "glm5", "glm-5"),
    ):
        with pytest.raises(ValueError, match=rf"no .*'{wrong}'; did you mean {meant}\?$"):
            ask(wrong)
    with pytest.raises(ValueError, match=r"has no part 'unit'; did you mean unet\?$"):
        zoo.build("sd15", "cpu", parts="unit")
