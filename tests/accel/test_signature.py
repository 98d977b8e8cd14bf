"""Arguments: what makes two calls the same, and how containers are taken apart and rebuilt."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.backend import Backend
from accel.signature import (
    Edits,
    StaticInputs,
    Uncapturable,
    argument_name,
    leaves,
    map_tree,
    opened,
    signature,
)
from tests.accel.same import assert_same

Point = namedtuple("Point", "x y")


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclasses.dataclass
class Extra:
    sample: Any
    note: str = "a"


class Shelf(OrderedDict[str, Any]):
    """A dict of its own type, with attributes."""

    label = "plain"


def with_attribute(x: Any) -> Any:
    x.scale = 2
    return x


def key(call: Any, backend: Backend) -> tuple[Any, Any]:
    made = signature(((call,), {}), backend)
    hash(made[:2])
    return made.shapes, made.values


SAME: dict[str, Callable[[Tensor], tuple[Any, Any]]] = {
    "other values": lambda x: (x, x * 2),
    "timesteps at other places": lambda x: (x[0, 1], x[1, 2]),
    "one timestep for all, at other places": lambda x: (x[0, 1].expand(4), x[1, 2].expand(4)),
    "equal containers": lambda x: ({"a": [x, 1]}, {"a": [x + 1, 1]}),
    "equal slices": lambda x: (slice(0, 2), slice(0, 2)),
    "equal small host tensors": lambda x: (torch.ones(2), torch.ones(2)),
    "NaN": lambda x: (float("nan"), float("nan")),
    "dataclasses": lambda x: (Extra(x), Extra(x + 1)),
}
DIFFERENT: dict[str, Callable[[Tensor], tuple[Any, Any]]] = {
    "shape": lambda x: (x, x[:1]),
    "stride": lambda x: (x.view(4, 4), x.view(4, 4).t()),
    "an expanded tensor": lambda x: (x[0, :1].expand(4), x[0]),
    "dtype": lambda x: (x, x.double()),
    "device": lambda x: (x.cpu()[:1], x[:1]),
    "requires_grad": lambda x: (x, x.clone().requires_grad_()),
    "alignment": lambda x: (x.flatten()[:4], x.flatten()[1:5]),
    "an int and a float": lambda x: (1, 1.0),
    "an int and a bool": lambda x: (1, True),
    "signs of zero": lambda x: (0.0, -0.0),
    "None and zero": lambda x: (None, 0),
    "strings": lambda x: ("a", "b"),
    "enums": lambda x: (Kind.ONE, Kind.TWO),
    "dtypes": lambda x: (torch.float32, torch.float16),
    "a list and a tuple": lambda x: ([x], (x,)),
    "lengths": lambda x: ([x], [x, x.clone()]),
    "names": lambda x: ({"a": x}, {"b": x}),
    "orders of names": lambda x: ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
    "one tensor twice": lambda x: ((x, x), (x, x.clone())),
    "named tuples": lambda x: (Point(1, 2), (1, 2)),
    "dataclass fields": lambda x: (Extra(x, "a"), Extra(x, "b")),
    "slices": lambda x: (slice(0, 2), slice(0, 3)),
    "small host tensors": lambda x: (torch.ones(2), torch.zeros(2)),
    "a nested list": lambda x: ([[x], []], [[], [x]]),
}


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.arange(16.0).view(4, 4).to(device)


@pytest.mark.parametrize("what", SAME)
def test_calls_that_share_a_recording(what: str, x: Tensor, backend: Backend) -> None:
    one, other = SAME[what](x)
    assert key(one, backend) == key(other, backend)


@pytest.mark.parametrize("what", DIFFERENT)
def test_calls_that_differ(what: str, x: Tensor, backend: Backend) -> None:
    one, other = DIFFERENT[what](x)
    assert key(one, backend) != key(other, backend)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "an object": (lambda x: object(), "argument [0] is a object"),
    "a set": (lambda x: {1}, "is a set"),
    "a module": (lambda x: torch.nn.Linear(1, 1), "is a Linear"),
    "an object deep inside": (lambda x: {"a": [x, object()]}, "argument [0].a[1] is a object"),
    "a large host tensor": (lambda x: torch.ones(100), "host tensor of 100"),
    "a sparse tensor": (lambda x: torch.eye(2).to_sparse(), "sparse"),
    "a conjugate": (lambda x: torch.complex(x, x).conj(), "conjugated"),
    "a meta tensor": (lambda x: torch.ones(1, device="meta"), "is on meta"),
    "a tensor in a slice": (lambda x: slice(object(), 2), "is a object"),
    "a tensor with an attribute": (lambda x: with_attribute(x + 1), "tensor that carries 'scale'"),
    "a dict with an attribute": (
        lambda x: [x, with_attribute(Shelf(x=x))],
        "argument [0][1], a Shelf, carries 'scale'",
    ),
    "a dataclass with an attribute": (
        lambda x: with_attribute(Extra(x)),
        "argument [0], a Extra, carries 'scale'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_keyed_is_named(what: str, x: Tensor, backend: Backend) -> None:
    make, complaint = REFUSED[what]
    with pytest.raises(Uncapturable) as refused:
        signature(((make(x),), {}), backend)
    assert complaint in str(refused.value)


def test_keywords_are_named(x: Tensor, backend: Backend) -> None:
    with pytest.raises(Uncapturable, match=r"^extras\.cache is a object"):
        signature(((x,), {"extras": {"cache": object()}}), backend)
    call = (x, 1), {"scale": 2.0, "extra": {"steps": 3}}
    made = signature(call, backend)
    names = [argument_name(call, place) for place in made.places]
    assert names == ["argument [1]", "scale", "extra.steps"]
    call = (x, [torch.ones(2), x], {"cpu": 4.5}), {"torch.device": torch.device("cpu")}
    made = signature(call, backend)
    names = [argument_name(call, place) for place in made.places]
    assert names == ["argument [1][0]", "argument [2].cpu", "torch.device"]
    assert len(made.values) == 3


def test_tensors_are_collected_once_each(x: Tensor, backend: Backend) -> None:
    y = x * 2
    made = signature(((x, [y, x]), {"z": y}), backend)
    assert [t is u for t, u in zip(made.tensors, [x, y], strict=True)] == [True, True]


class TestTrees:
    @pytest.mark.parametrize(
        "tree",
        [
            [1, (2, [3]), {"a": 4}],
            Point(1, [2]),
            Extra([1, 2]),
            OrderedDict(a=1, b=[2]),
            Shelf(a=1),
            slice(1, 2, None),
            [],
            {},
        ],
    )
    def test_a_tree_is_built_anew_as_it_was(self, tree: Any) -> None:
        again = map_tree(lambda leaf: leaf, tree)
        assert again == tree
        assert type(again) is type(tree)

    def test_nothing_is_shared_with_the_original(self) -> None:
        tree = {"a": [1, 2]}
        again = map_tree(lambda leaf: leaf, tree)
        again["a"].append(3)
        assert tree == {"a": [1, 2]}
        assert leaves(tree) == [1, 2]

    def test_a_list_that_is_there_twice_stays_one(self) -> None:
        xs, pair = [1], (2,)
        first, second, *tuples = map_tree(lambda leaf: leaf, [xs, xs, pair, pair])
        assert first is second and first is not xs
        assert tuples == [pair, pair]


def test_one_list_twice_is_not_two_alike(backend: Backend) -> None:
    xs = [1]
    one, two = (signature(((xs, other), {}), backend) for other in (xs, [1]))
    assert one.shapes != two.shapes
    assert one.shapes == signature((((ys := [1]), ys), {}), backend).shapes


class TestEdits:
    def edited(self, forward: Callable[[Any], Any], theirs: Any) -> Any:
        given = map_tree(lambda leaf: leaf, theirs)
        edits = Edits(((given,), {}))
        forward(given)
        edits.close()
        edits.apply(((theirs,), {}))
        return theirs

    def test_popping(self) -> None:
        assert self.edited(lambda xs: xs.pop(0), ["a", "b", "c"]) == ["b", "c"]
        assert self.edited(lambda d: d.pop("a"), {"a": 1, "b": 2}) == {"b": 2}
        assert self.edited(lambda d: d["xs"].pop(), {"xs": ["a", "b"]}) == {"xs": ["a"]}

    def test_reversing_and_clearing(self) -> None:
        assert self.edited(lambda xs: xs.reverse(), ["a", "b", "c"]) == ["c", "b", "a"]
        assert self.edited(lambda xs: xs.clear(), ["a", "b"]) == []

    def test_putting_something_in_is_refused(self) -> None:
        with pytest.raises(Uncapturable, match="puts something into"):
            self.edited(lambda xs: xs.append(object()), ["a"])

    def test_replacing_an_entry_is_refused(self) -> None:
        with pytest.raises(Uncapturable, match="puts something into"):
            self.edited(lambda d: d.update(a=object()), {"a": 1})


class TestStaticInputs:
    def test_copies_are_the_runners_own(self, x: Tensor, backend: Backend) -> None:
        static = StaticInputs([x, x[0].expand(3, 4)], backend)
        before = x.clone()
        x.zero_()
        assert_same(static.tensors[0], before)
        assert static.tensors[1].stride() == (0, 1)

    def test_repetitions_are_copied_once_and_stay(self, x: Tensor, backend: Backend) -> None:
        static = StaticInputs([x, x[0].expand(3, 4), x.double()], backend)
        static.fill([x + 1, (x[1] + 2).expand(3, 4), x.double() * 3])
        assert_same(static.tensors[0], x + 1)
        assert_same(static.tensors[1], (x[1] + 2).expand(3, 4))
        assert_same(static.tensors[2], x.double() * 3)

    def test_substitution_leaves_the_call_alone(self, x: Tensor, backend: Backend) -> None:
        call = (([x], 1), {"y": x})
        static = StaticInputs([x], backend)
        (xs, one), kwargs = static.substitute(call, [x])
        assert xs[0] is kwargs["y"] is static.tensors[0]
        assert one == 1
        assert call[0][0][0] is x

    def test_what_asks_for_gradients_does_so_in_the_recording(
        self, x: Tensor, backend: Backend
    ) -> None:
        static = StaticInputs([x, x.clone().requires_grad_()], backend)
        assert [copy.requires_grad for copy in static.tensors] == [False, True]
        static.fill([x + 1, x + 2])
        assert_same(static.tensors[1].detach(), x + 2)

    def test_a_tensor_that_overlaps_itself_is_refused(self, x: Tensor, backend: Backend) -> None:
        with pytest.raises(Uncapturable, match="overlap"):
            StaticInputs([x.as_strided((3, 4), (2, 1))], backend)


def test_a_dataclass_that_refuses_to_tell_a_field_has_the_others() -> None:
    @dataclasses.dataclass
    class PerLayer:
        size: int = 3
        width: int = 4

        def __getattribute__(self, name: str) -> object:
            if name == "width":
                raise ValueError("it varies from layer to layer")
            return object.__getattribute__(self, name)

    container = opened(PerLayer())
    assert container is not None
    assert (container.names, container.children) == (("size",), [3])
