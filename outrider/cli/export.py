"""`outrider export FOLDER`: a trained drafter in the layout that vLLM, SGLang, Medusa's code or transformers reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.bench_options import changed
from outrider.cli.export_options import VllmOptions
from outrider.cli.lab import command_line
from outrider.cli.options import with_groups
from outrider.cli.writable import check_folder
from outrider.errors import ConfigError

Folder = Annotated[Path, typer.Argument(help="A drafter: what 'outrider train' left in DIR/drafter.", show_default=False)]
TargetOption = Annotated[
    str, typer.Option("--target", help="Whom it drafts for: 'demo', a local folder, or a hub id.", show_default=False)
]
To = Annotated[str, typer.Option(help="Layout: raw, speculators, medusa, vllm or transformers.", show_default=False)]
Out = Annotated[Path, typer.Option(help="New folder.", show_default=False)]
Check = Annotated[
    bool,
    typer.Option("--check", help="Load it again, compare every tensor and the config; where there is vLLM, draft with it there."),
]
NOT_COMPARED = "not compared: no vLLM in this Python; --vllm PYTHON names one that has it"

NOT_FINISHED = "not compared: vLLM was not done when this ended"


@with_groups
def export(folder: Folder, target: TargetOption, to: To, out: Out, vllm: VllmOptions, check: Check = False) -> int:
    """Write a trained drafter in a published layout."""
    from outrider.cli.session import progress, quieten_libraries

    check_folder(out)
    if not check and (unused := changed(vllm)):
        raise ConfigError(f"{', '.join(unused)} {'mean' if len(unused) > 1 else 'means'} nothing without --check")
    with progress(f"loading {target}") as status:
        from outrider.build import DEMO
        from outrider.demo import demo_paths
        from outrider.report.console import print_document
        from outrider.report.render import render
        from outrider.train import export as exporting
        from outrider.train.export_result import FILE, ExportResult
        from outrider.train.vllm.compare import compare
        from outrider.train.vllm.process import Interpreter, VllmError

        quieten_libraries()
        if to not in exporting.LAYOUTS:
            raise ConfigError(f"--to takes one of {', '.join(exporting.LAYOUTS)}; got '{to}'")
        interpreter = Interpreter.find(vllm.vllm) if check else None
        loaded = exporting.Target.load(str(demo_paths().target) if target == DEMO else target, target)
        kind, _ = exporting.writer_for(folder, to)
        how = vllm.comparing(kind, folder, loaded) if interpreter is not None else None
        status(f"writing {out}")
        exporting.export(folder, to, out, loaded)
        result = ExportResult(
            drafter=kind, layout=to, source=str(folder), target=target, command=command_line(),
            checks=exporting.check(folder, kind, out, loaded) if check else [],
            not_compared="not compared: no --check" if not check else NOT_COMPARED if how is None else NOT_FINISHED,
        )  # fmt: skip
        result.write(out / FILE)
        refused: VllmError | None = None
        if interpreter is not None and how is not None:
            log = out.with_name(f"{out.name}.vllm.log")
            try:
                result.compared = compare(interpreter, kind, folder, out, loaded, how, log, status)
                result.not_compared = ""
                log.unlink()  # it is for those who look for a mistake
            except VllmError as error:
                refused, result.not_compared = error, f"not compared: {error.reason}"
            result.write(out / FILE)
    sys.stdout.write(f"{kind} written to {out} in layout {to}\n")
    if check:
        print_document(render(result))
    if refused is not None:
        sys.stderr.writelines(f"vllm: {line}\n" for line in refused.tail())
        raise refused
    return 0 if result.compared is None or result.compared.is_within else 1
