import io
import json
import math

import pytest

from accel.pipelines.console import escape_what_stdout_cannot_encode, print_json


def test_what_is_no_number_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"scores": [1.5, math.nan, (math.inf, -math.inf)], "name": "NaN", "none": None})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"scores": [1.5, None, [None, None]], "name": "NaN", "none": None}


@pytest.mark.parametrize(("codes", "told"), [("ascii", b"gr\\xf6\\xdfer\n"), ("utf-8", None)])
def test_a_letter_that_stdout_has_no_code_for_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, codes: str, told: bytes | None
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), codes)
    monkeypatch.setattr("sys.stdout", stdout)
    escape_what_stdout_cannot_encode()
    print("größer", flush=True)
    assert stdout.buffer.getvalue() == (told or "größer\n".encode())
