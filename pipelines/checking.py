"""`accel verify`: the same seed without and with graphs, compared bit for bit.

Whole pictures first: eager twice (is the pipeline the same as itself?), patched several times (the
first record, the later ones replay); then `accel.verify`, which compares call by call and says
where a difference begins; then eager again once the patch is off.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from accel.pipelines.arguments import is_modular
from accel.pipelines.comparison import Comparison, compare
from accel.pipelines.console import OnPicture, unheard
from accel.pipelines.generation import call_arguments, make
from accel.pipelines.settings import Settings
from accel.pipelines.subjects import Subject

if TYPE_CHECKING:
    from accel.patches.findings import Verification
    from accel.patches.part import Capture


@dataclass(frozen=True)
class Check:
    """One run against the first eager one."""

    run: str
    comparison: Comparison


def verify(
    subject: Subject, *, runs: int = 4, capture: Capture = "auto", on_picture: OnPicture = unheard
) -> dict[str, Any]:
    """Runs the comparison; `equal` in the result is the answer, `verdict` puts it in words."""
    import accel

    pipe, settings = subject.pipe, subject.inputs
    on_picture("eager")
    reference = make(pipe, settings, latents=True)

    def check(run: str) -> Check:
        on_picture(run)
        return Check(run, compare(reference, make(pipe, settings, latents=True)))

    checks = [check("eager again")]
    accel.patch(pipe, capture=capture)
    try:
        checks += [check(f"patched, run {index + 1}") for index in range(runs)]
        replays = sum(part.replays for part in accel.report(pipe).parts)
        on_picture("call by call")
        calls = accel.verify(pipe, **_arguments(pipe, settings))
        report = accel.report(pipe)
    finally:
        accel.unpatch(pipe)
    checks.append(check("eager after unpatch"))
    nothing = report.inactive or (None if replays else "no part was replayed")
    pictures = all(c.comparison.equal and c.comparison.proves_something for c in checks)
    return {
        "model": subject.settings.model,
        "settings": subject.settings.to_dict(),
        "equal": pictures and calls.passed,
        "verdict": _verdict(checks, calls, nothing, replays),
        "nothing_accelerated": nothing,
        "replays": replays,
        "checks": [
            {"run": c.run, "equal": c.comparison.equal} | asdict(c.comparison) for c in checks
        ],
        "calls": calls.to_dict(),
        "report": report.to_dict(),
    }


def _arguments(pipe: Any, settings: Settings) -> dict[str, Any]:
    """The call that `make` makes, without looking at its steps."""
    import torch

    generator = torch.Generator("cpu").manual_seed(settings.seed)
    output = {"output": ["images", "latents"]} if is_modular(pipe) else {}
    return {**call_arguments(pipe, settings), "generator": generator, **output}


def _verdict(checks: list[Check], calls: Verification, nothing: str | None, replays: int) -> str:
    weak = next((c for c in checks if not c.comparison.proves_something), None)
    if weak is not None:
        flaw = "a flat picture" if weak.comparison.finite else "latents that are not finite"
        where = "" if calls.non_finite is None else f" ({calls.non_finite})"
        return f"proves nothing: {weak.run} gave {flaw}{where}; try another prompt, seed or --dtype"
    first = "" if calls.first_difference is None else f"; first: {calls.first_difference}"
    if not checks[0].comparison.equal:
        return (
            "differs, but not because of accel: two eager runs of one seed already "
            f"differ ({_difference(checks[0].comparison)}){first}"
        )
    wrong = next((c for c in checks if not c.comparison.equal), None)
    if wrong is not None:
        return f"differs: {wrong.run} ({_difference(wrong.comparison)}){first}"
    if calls.first_difference is not None:
        return f"differs: {calls.first_difference}"
    if calls.non_finite is not None:
        return f"proves nothing: {calls.non_finite}"
    if nothing is not None:
        return f"equal, trivially: nothing was accelerated ({nothing})"
    return (
        f"equal: latents and PNG bytes of {len(checks)} runs, {replays} replays; "
        f"{calls.calls} calls of patched parts, {calls.replays} replays"
    )


def _difference(comparison: Comparison) -> str:
    what = "latents" if comparison.latents_equal is False else "picture only"
    if comparison.largest_latent_difference is None:
        return what
    return f"{what}, largest difference of latents {comparison.largest_latent_difference:.3g}"
