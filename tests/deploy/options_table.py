"""The options in docs/operations.md: ``python -m tests.deploy.options_table`` renews the table."""

from typing import Any

import typer

from services.cli.main import app
from tests.deploy.observed import ROOT

DOCUMENT = ROOT / "docs" / "operations.md"
COMMANDS = ("serve", "router", "worker")
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->\n"


def options_table() -> str:
    """Markdown: every option of every command that starts something, from the command line."""
    commands: Any = typer.main.get_command(app)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for command in COMMANDS:
        for option in commands.commands[command].params:
            if option.param_type_name == "option":
                said = (_name(option), _default(option), " ".join((option.help or "").split()))
                rows.setdefault(said, []).append(command)
    lines = ["| option | of | default | |", "| --- | --- | --- | --- |"]
    for (name, default, text), where in sorted(rows.items()):
        lines.append(f"| {name} | {', '.join(where)} | {default} | {_escaped(text)} |")
    return "\n".join(lines) + "\n"


def _name(option: Any) -> str:
    value = "" if option.is_flag or not option.metavar else f" {_escaped(option.metavar)}"
    return f"`{option.opts[0]}{value}`"


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    if option.is_flag:
        return "on" if option.default else "off"
    return "" if option.default is None else str(option.default)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    before, rest = DOCUMENT.read_text("utf-8").split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + options_table() + END + rest.split(END)[1], "utf-8")


if __name__ == "__main__":
    main()
