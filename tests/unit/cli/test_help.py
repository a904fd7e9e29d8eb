"""The commands and their help texts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from flagstone.cli.main import app
from flagstone.kernels import COMPILED

COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]

SLATEDBS = [
    "read-manifest",
    "list-manifests",
    "read-compactions",
    "list-compactions",
    "read-compaction",
    "create-checkpoint",
    "refresh-checkpoint",
    "delete-checkpoint",
    "list-checkpoints",
    "delete-db",
    "scan",
    "run-garbage-collection",
    "schedule-garbage-collection",
    "run-compactor",
    "run-worker",
    "seq-to-ts",
    "ts-to-seq",
    "submit-compaction",
]
OURS = ["get", "put", "delete", "clone", "union", "restore", "verify", "repair", "compact", "stats"]

FLAGS = {
    "read-manifest": "-i --id",
    "list-manifests": "-s --start -e --end",
    "read-compactions": "-i --id",
    "list-compactions": "-s --start -e --end",
    "read-compaction": "-i --id --compactions-id",
    "create-checkpoint": "-l --lifetime -s --source -n --name",
    "refresh-checkpoint": "-i --id -l --lifetime",
    "delete-checkpoint": "-i --id",
    "list-checkpoints": "-n --name",
    "delete-db": "--confirm",
    "scan": "--prefix --from --to --key --value --max-keys --count --checkpoint",
    "run-garbage-collection": "-r --resource -m --min-age --disable-boundary-files",
    "schedule-garbage-collection": "--manifest --wal --wal-fence --compacted --compactions --disable-boundary-files",
    "run-compactor": "--no-embedded-worker",
    "run-worker": "",
    "seq-to-ts": "--round",
    "ts-to-seq": "--round",
    "submit-compaction": "--scheduler --request",
}
"""SlateDB's flags by subcommand."""


def options_of(command: str) -> set[str]:
    parameters = get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {name for parameter in parameters for name in parameter.opts}


@pytest.mark.parametrize("command", SLATEDBS + OURS)
def test_every_promised_command_exists(command: str) -> None:
    assert command in COMMANDS


@pytest.mark.slow
@pytest.mark.parametrize("command", SLATEDBS)
def test_every_flag_of_slatedb_exists(command: str) -> None:
    assert set(FLAGS[command].split()) <= options_of(command)


def test_slatedbs_global_flags_exist() -> None:
    names = {name for parameter in get_command(app).params for name in parameter.opts}
    assert {"-e", "--env-file", "-p", "--path", "-V", "--version"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_database_and_has_an_example(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.stderr
    assert "For example:" in done.stdout
    assert f" {command}" in done.stdout.partition("For example:")[2]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_and_help_for_its_options(command: str) -> None:
    assert "--json" in options_of(command)
    for parameter in get_command(app).commands[command].params:  # type: ignore[attr-defined]
        assert parameter.help, f"{command} {parameter.name} has no help"


@pytest.mark.slow
def test_without_arguments_the_help_lists_the_commands() -> None:
    done = CliRunner().invoke(app, [])
    for command in COMMANDS:
        assert f" {command} " in done.output


def test_version_prints_the_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.stdout.startswith("flagstone ")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["compiled", "interpreted"])
def test_interpreted_kernels_are_shown_with_the_version(form: str) -> None:
    if form == "compiled" and not COMPILED:
        pytest.skip("the kernels of this installation are not compiled")
    done = subprocess.run(
        [sys.executable, "-c", "from flagstone.cli.main import main; main()", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "FLAGSTONE_KERNELS": "interpreted" if form == "interpreted" else ""},
    )
    assert ("kernels interpreted" in done.stdout) == (form == "interpreted")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed_for_each_shell(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise typer searches for a shell among the parents of this process, and there may be none.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(app, ["--show-completion", shell])
    assert done.exit_code == 0
    assert "_FLAGSTONE_COMPLETE" in done.stdout


@pytest.mark.slow
def test_help_does_not_import_the_engine() -> None:
    heavy = (
        "obstore",
        "pyarrow",
        "yaml",
        "flagstone.config",
        "flagstone.db.admin.admin",
        "flagstone.metadata.manifest",
        "flagstone.kernels",
    )
    code = (
        "import sys; from flagstone.cli.main import app\n"
        "try: app(['--help'])\n"
        f"except SystemExit: print(*[name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr.split() == []


def test_the_reference_lists_exactly_the_commands() -> None:
    reference = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    for command in COMMANDS:
        assert f"`{command}" in reference, f"docs/cli.md does not mention {command}"
    for line in reference.splitlines():
        if line.startswith("flagstone -"):
            words = line.split()
            assert set(words) & set(COMMANDS), line


@pytest.mark.slow
def test_the_examples_of_the_reference_have_valid_options() -> None:
    reference = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    examples = [line for line in reference.splitlines() if line.startswith("flagstone -")]
    assert len(examples) > 10
    for line in examples:
        words = shlex.split(line.partition(" > ")[0])[1:]
        # Options are parsed before the database is opened, so only the database may be missing.
        done = CliRunner().invoke(app, [*words, "--help"])
        assert done.exit_code == 0, f"{line}: {done.stderr}"
