"""`segpipe audit`: checks a run's claims and prints them as a table and a report."""

import secrets
from pathlib import Path

from segpipe.audit.examine import check_folder, examine
from segpipe.cli.commands import Given
from segpipe.cli.export import verify
from segpipe.errors import SegpipeError
from segpipe.export.verify import read_manifest
from segpipe.files import to_json, write_atomically
from segpipe.run.console import CONSOLE, ERRORS, progress, table, verdict
from segpipe.settings.config import Config, flat


def main(given: Given) -> int:
    """Exit code of `segpipe audit`; draws a seed if none is given."""
    out = Path(given["out"] or Path(given["run"], "audit"))
    check_folder(out)

    def gates(config: Config, folder: Path) -> str:
        """The last line of `segpipe verify`, against the checkpoint that the folder names as its source.

        `verify` checks that claim by the digest of the weights.
        """
        made_of = read_manifest(folder)["source"]["checkpoint"] or {}
        which = "best" if made_of.get("file") == "best.pt" else "last"
        asked = {"run": given["run"], "which": which, "artifact": str(folder)}
        return verify({**flat(config), **asked}).line("ARTIFACT")

    with progress("audit") as show:
        found = examine(
            Path(given["run"]),
            lambda what, done, total: show(done, total or None, what),
            seed=secrets.randbelow(2**32) if given["seed"] < 0 else given["seed"],
            spans=given["spans"],
            span_steps=given["span_steps"],
            any_environment=given["any_environment"],
            settings=given,
            verify=gates if given["verify"] else None,
        )
    rows = [(line.part, verdict(line.status), line.text) for line in found.lines]
    columns = ("part", "verdict", "finding")
    CONSOLE.print(table(columns, rows, f"audit of {found.run}"))
    CONSOLE.print(f"{found.sentence.rstrip('.')}.")
    report = out / "report.json"
    try:
        write_atomically(report, to_json(found.to_json()))
        CONSOLE.print(f"Report: {report}")
    except SegpipeError as error:
        ERRORS.print(f"{error} Set out=FOLDER for the report.")
        return found.exit_code or error.exit_code
    return found.exit_code
