"""The 20 prompts of the goldens: our own texts, chosen for lengths and scripts that break things.

Used by ``make_goldens`` alone; tests read ids and texts from the JSON file.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, cut to ``num_tokens`` if given; or a chat, rendered by the model's template."""

    name: str
    text: str = ""
    num_tokens: int | None = None
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content)"""


_FERRY = (
    "The night ferry left the harbour a little after eleven, and by midnight the lights of the "
    "town were a thin line behind us. Nobody on deck spoke much. The engineer came up from below "
    "to look at the sky, counted the stars he knew by name, and went back to his machines."
)

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_WINDS = ("a light wind from the west", "fog until noon", "heavy rain", "a clear cold sky")
_CARGO = ("timber", "salt", "apples", "letters and two bicycles", "glass", "wool", "clay pots")


def _logbook(num_days: int) -> str:
    """A harbour's log: regular enough to be read, varied enough that no day repeats another."""
    lines = ["Log of the small harbour, kept by its only clerk.", ""]
    for day in range(num_days):
        boats = 2 + day * 5 % 7
        lines.append(
            f"{_DAYS[day % 7]}, day {day + 1}. Weather: {_WINDS[day * 3 % 4]}. {boats} boats came "
            f"in with {_CARGO[day * 2 % 7]} and {_CARGO[(day * 2 + 3) % 7]}; {boats - 1} left "
            f"again before dark. The toll box held {boats * 35 + day} coins. "
            f"{'The crane was out of order.' if day % 5 == 3 else 'All was quiet at the pier.'}"
        )
    return "\n".join(lines)


_PYTHON = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists."""
    merged = []
    i = j = 0
    while i < len(left) and j < len(right):
'''

_C = """#include <stdio.h>

/* Print the first n squares, one on a line. */
static void squares(int n)
{
\tfor (int i = 1;  i <= n;  i++) {
"""

_SQL = """CREATE TABLE boats (id INTEGER PRIMARY KEY, name TEXT, length_m REAL);
INSERT INTO boats VALUES (1, 'Heron', 12.5), (2, 'Otter', 8.25);
-- the longest boat
SELECT"""

PROMPTS = (
    Prompt("one token", "Water"),
    Prompt("block size - 1", _FERRY, 15),
    Prompt("block size", _FERRY, 16),
    Prompt("block size + 1", _FERRY, 17),
    Prompt("two blocks - 1", _FERRY, 31),
    Prompt("two blocks", _FERRY, 32),
    Prompt("two blocks + 1", _FERRY, 33),
    Prompt("long", _logbook(40), 1500),
    Prompt(
        "emoji",
        "Weather report in emoji: ☀️🌤️⛅🌧️⛈️❄️ and families: 👨‍👩‍👧‍👦 🏳️‍🌈 🇯🇵. Their meanings are:",
    ),
    Prompt("chinese", "今天早上，河边的雾很大，渡船晚了半个小时。船长说："),
    Prompt(
        "mixed scripts", "Übung: 你好 means hello, 🍎 is an apple, Ελλάδα is Greece, and мир is"
    ),
    Prompt("python", _PYTHON),
    Prompt("c", _C),
    Prompt("sql", _SQL),
    Prompt(
        "chat",
        messages=(("user", "Name three things that float on water, and say why they do."),),
    ),
    Prompt(
        "chat with system",
        messages=(
            ("system", "You answer in one short sentence."),
            ("user", "Why is the sky dark at night?"),
        ),
    ),
    Prompt(
        "chat of several turns",
        messages=(
            ("system", "You are a patient teacher."),
            ("user", "What is 7 times 8?"),
            ("assistant", "7 times 8 is 56."),
            ("user", "And how could I have worked that out without knowing it? 🤔"),
        ),
    ),
    Prompt("english", _FERRY),
    Prompt("question", "Q: What do bees make from the nectar they collect?\nA:"),
    Prompt("digits", "In 1969  and 2024, the totals were  1234567 and 89.01; the difference is"),
)
