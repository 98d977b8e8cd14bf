"""The command line: reads arguments, calls the room's other modules, prints what they return.

Nothing heavy is imported before a command needs it, so that help and wrong arguments are answered
at once. Exit codes are told by `options.EXIT_CODES`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from accel.pipelines import options, spreading
from accel.pipelines.console import escape_what_stdout_cannot_encode, note, print_json
from accel.pipelines.errors import BadInput, explained, misread
from accel.pipelines.models import Trust

INTERRUPTED = 130

app = typer.Typer(
    name="accel",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=options.EXIT_CODES,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def accel(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Runs Hugging Face diffusers pipelines as breakable CUDA graphs: same picture, less time."""
    if version:
        from accel import __version__

        print(f"accel {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code. Errors are one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _spin_briefly()
    escape_what_stdout_cannot_encode()
    try:
        _refuse_a_folder_that_is_gone()
        code = app(given, standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            return _interrupted()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Exception as error:
        if "--debug" in given:
            traceback.print_exc()
        spreading.let_main_speak_first()
        if isinstance(error, spreading.ToldByMain):
            return error.exit_code
        if (wrong := misread(error)) is not None:
            note(wrong)
            return BadInput.exit_code
        known = explained(error)
        note(str(known))
        return known.exit_code


def _spin_briefly() -> None:
    """To be called before torch is loaded, whose threads else spin for milliseconds while they wait
    for each other: where cores are shared they take them from each other, and a picture that needs
    one second took six, or sixty. Not to spin at all costs half a second where cores are free."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _refuse_a_folder_that_is_gone() -> None:
    """Libraries answer that with riddles, or by ending the process."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise BadInput("the current folder is gone: change to one that is there") from error


def _interrupted() -> int:
    if spreading.is_main():
        note("interrupted")
    return INTERRUPTED


@app.command()
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="One or several prompts.", show_default=False)
    ] = None,
    prompts_file: Annotated[
        str | None, typer.Option("--prompts", help="A file with one prompt a line; - is stdin.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help=options.MODEL_HELP + " [default: demo]")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="A .png, a folder, or a pattern with {index} {seed} {prompt} {model}.",
        ),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Make a picture again from its PNG.")
    ] = None,
    size: options.Size = None,
    steps: options.Steps = None,
    guidance: options.Guidance = None,
    negative_prompt: options.Negative = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**32 - 1, help="[default: random]")
    ] = None,
    number: Annotated[
        int,
        typer.Option(
            "--number",
            "-n",
            min=1,
            max=options.MOST_PICTURES,
            help="Pictures per prompt, seeds counting up.",
        ),
    ] = 1,
    extra: options.Extra = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    lora: options.Loras = None,
    mode: Annotated[str, typer.Option("--mode", help="exact (accelerated) or off.")] = "exact",
    trust_pickle: options.TrustPickle = False,
    trust_remote_code: options.TrustCode = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Makes pictures from prompts."""
    from accel.pipelines import making
    from accel.pipelines.prompts import parse_extra, read_prompts

    def order() -> making.Order:
        return making.Order(
            prompts=read_prompts(prompts or [], prompts_file),
            source=source,
            changes={
                "model": model,
                "steps": steps,
                "guidance": guidance,
                "negative_prompt": negative_prompt,
                "dtype": dtype,
            },
            size=size,
            extra=parse_extra(extra or []),
            loras=lora or [],
            seed=seed,
            number=number,
            output=output,
            device=device,
            mode=mode,
            trust=Trust(trust_pickle, trust_remote_code),
            quiet=not debug,
            stdout_is_json=json,
        )

    with spreading.team(device) as team:
        result = making.fulfil(team.decided(order), team)
        if json and team.is_main:
            print_json(result)


@app.command()
def bench(
    model: options.Subject,
    prompt: options.Prompt = None,
    size: options.Size = None,
    steps: options.Steps = None,
    guidance: options.Guidance = None,
    negative_prompt: options.Negative = None,
    seed: options.Seed = 0,
    extra: options.Extra = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    lora: options.Loras = None,
    capture: options.Capture = "auto",
    repeats: options.Repeats = 5,
    plot: options.PlotFile = None,
    output: options.ResultFile = None,
    trust_pickle: options.TrustPickle = False,
    trust_remote_code: options.TrustCode = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Times the whole pipeline eager and patched, in turns, and compares the pictures."""
    from accel.pipelines import studies

    study = studies.Study(
        model,
        studies.wishes(prompt, size, steps, guidance, negative_prompt, seed, extra, dtype, lora),
        device=device,
        capture=capture,
        trust=Trust(trust_pickle, trust_remote_code),
        output=output,
        json=json,
        debug=debug,
    )
    if not studies.bench(study, repeats=repeats, plot=plot):
        raise typer.Exit(1)


@app.command()
def verify(
    model: options.Subject,
    prompt: options.Prompt = None,
    size: options.Size = None,
    steps: options.Steps = None,
    guidance: options.Guidance = None,
    negative_prompt: options.Negative = None,
    seed: options.Seed = 0,
    extra: options.Extra = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    lora: options.Loras = None,
    capture: options.Capture = "auto",
    runs: options.Runs = 4,
    output: options.ResultFile = None,
    trust_pickle: options.TrustPickle = False,
    trust_remote_code: options.TrustCode = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Compares the same seed with and without graphs: PNG bytes, latents, every part's calls."""
    from accel.pipelines import studies

    study = studies.Study(
        model,
        studies.wishes(prompt, size, steps, guidance, negative_prompt, seed, extra, dtype, lora),
        device=device,
        capture=capture,
        trust=Trust(trust_pickle, trust_remote_code),
        output=output,
        json=json,
        debug=debug,
    )
    if not studies.verify(study, runs=runs):
        raise typer.Exit(1)


@app.command()
def explain(
    model: options.Subject,
    prompt: options.Prompt = None,
    size: options.Size = None,
    steps: options.Steps = 4,
    guidance: options.Guidance = None,
    negative_prompt: options.Negative = None,
    seed: options.Seed = 0,
    extra: options.Extra = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    lora: options.Loras = None,
    capture: options.Capture = "auto",
    runs: options.Runs = 4,
    output: options.ResultFile = None,
    trust_pickle: options.TrustPickle = False,
    trust_remote_code: options.TrustCode = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Says for every part what was captured, replayed, broken, declined, and why."""
    from accel.pipelines import studies

    study = studies.Study(
        model,
        studies.wishes(prompt, size, steps, guidance, negative_prompt, seed, extra, dtype, lora),
        device=device,
        capture=capture,
        trust=Trust(trust_pickle, trust_remote_code),
        output=output,
        json=json,
        debug=debug,
    )
    studies.explain(study, runs=runs)


@app.command()
def prefill(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="One or several prompts; - reads them from stdin.", show_default=False),
    ] = None,
    prompts_file: Annotated[
        str | None, typer.Option("--prompts", help="A file with one prompt a line; - is stdin.")
    ] = None,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="demo, a causal LM's folder, or a hub id (owner/name)."),
    ] = "demo",
    mode: Annotated[
        str, typer.Option("--mode", help="breakable, full (one graph) or eager (no graph).")
    ] = "breakable",
    attention: Annotated[
        str, typer.Option("--attention", help="auto, reference, torch or flashinfer.")
    ] = "auto",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Tokens of a batch, and of a prompt.")
    ] = 8192,
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="Prompts of a batch in mode full.")
    ] = 16,
    score: Annotated[
        bool, typer.Option("--score", help="The log-probability of every token of the prompts.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="Next tokens shown per prompt.")] = 5,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed rounds.")] = 5,
    compare: Annotated[
        bool, typer.Option("--compare", help="Times the model's own forward beside it, in turns.")
    ] = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Only says what graphs would take here, and what has room."),
    ] = False,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    trust_pickle: options.TrustPickle = False,
    trust_remote_code: options.TrustCode = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Reads prompts with a language model: likely next tokens or scores, and how long it took."""
    from accel.pipelines import prefilling
    from accel.pipelines.texts import read_texts

    given = [*(prompts or []), *filter(None, [prompts_file])]
    order = prefilling.Order(
        prompts=given if plan else read_texts(prompts or [], prompts_file),
        model=model,
        mode=mode,
        attention=attention,
        max_tokens=max_tokens,
        max_requests=max_requests,
        score=score,
        plan=plan,
        compare=compare,
        top=top,
        repeats=repeats,
        device=device,
        dtype=dtype,
        trust=Trust(trust_pickle, trust_remote_code),
        quiet=not debug,
        stdout_is_json=json,
    )
    result = prefilling.fulfil(order)
    if json:
        print_json(result)
    else:
        from accel.pipelines import prefill_tables

        show = prefill_tables.print_plan if plan else prefill_tables.print_prefill
        show(result)


@app.command()
def doctor(
    prepare: Annotated[
        bool,
        typer.Option("--prepare", help="First compile FlashInfer's kernels for the GPUs here."),
    ] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Says what this machine has, what it lacks, and what was never tested."""
    from accel.pipelines import doctor as examination
    from accel.pipelines.console import kernels_shown, stdout_kept_clean

    if prepare:
        with stdout_kept_clean(json), kernels_shown() as on_kernel:
            examination.prepare(on_kernel)
    findings = examination.examine()
    if json:
        print_json(examination.to_dict(findings))
    else:
        from accel.pipelines.tables import print_doctor

        print_doctor(findings)


if __name__ == "__main__":
    sys.exit(main())
