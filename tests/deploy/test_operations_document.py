"""docs/operations.md has every metric, alias and alert of the code, and no other."""

import re

from services.runtime.vllm_names import INSTANCE, ROUTER
from tests.deploy.observed import ROOT, families, rules
from tests.deploy.options_table import BEGIN, END, options_table

TEXT = (ROOT / "docs" / "operations.md").read_text("utf-8")
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
ALIAS = re.compile(r"^\| `(vllm:\w+)` \| `(\w+)` \| (\w+ \w+) \|$", re.MULTILINE)
ALERT = re.compile(r"^\| `(KVRelay\w+)` \| (\w+) \| `([^`]+)` for (\w+) \| (.+) \|$", re.MULTILINE)


def test_every_metric_is_in_the_table_with_its_type_and_meaning() -> None:
    # The two that router and instances share have a row in each table.
    written = {
        (name, kind, text)
        for name, kind, _, text in ROW.findall(TEXT)
        if name.startswith("kvrelay_") and "Requests " not in text
    }
    measured = {
        (each.name + ("_total" if each.type == "counter" else ""), each.type, each.documentation)
        for name, each in families().items()
        if name.startswith("kvrelay_") and "Requests " not in each.documentation
    }
    assert written == measured
    names = [name for name, *_ in ROW.findall(TEXT)]
    for shared in ("kvrelay_requests_running", "kvrelay_requests_waiting"):
        assert names.count(shared) == 2
    assert names.count("kvrelay_requests_total") == 1


def test_every_alias_is_in_the_table() -> None:
    expected = {(each.theirs, each.ours, "the router") for each in ROUTER}
    expected |= {(each.theirs, each.ours, "an instance") for each in INSTANCE}
    assert set(ALIAS.findall(TEXT)) == expected


def test_every_alert_is_in_the_table_with_its_condition_and_advice() -> None:
    assert [
        (name, severity, condition.replace("&#124;", "|"), wait, advice)
        for name, severity, condition, wait, advice in ALERT.findall(TEXT)
    ] == [
        (
            rule["alert"],
            rule["labels"]["severity"],
            rule["expr"],
            rule["for"],
            rule["annotations"]["description"],
        )
        for rule in rules("alerts.yml")
    ]


def test_every_option_is_in_the_table() -> None:
    written = TEXT.split(BEGIN)[1].split(END)[0]
    assert written == options_table(), "renew it: python -m tests.deploy.options_table"
