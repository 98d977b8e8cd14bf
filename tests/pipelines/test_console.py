import json
import math

import pytest

from accel.pipelines.console import print_json


def test_what_is_no_number_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"scores": [1.5, math.nan, (math.inf, -math.inf)], "name": "NaN", "none": None})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"scores": [1.5, None, [None, None]], "name": "NaN", "none": None}
