"""The documents say what the program does: tables, commands, links, keys, and both editions in step."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from qwen_quantize.chip_profiles.arithmetic import ASSUMABLE
from qwen_quantize.cli.main import EXPERT_POLICIES, app
from qwen_quantize.models.lookup import BY_ARCHITECTURE
from tests.tiny_models import make_tiny, make_tokenizer, words
from tools import readme_tables
from tools.readme_words import CHINESE, ENGLISH, LANGUAGES, Language

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh-CN.md")
DOCUMENTS = (*READMES, "CONTRIBUTING.md", "CHANGELOG.md", "qwen_quantize/embedded/LICENSE-DATA.md")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(
    r"[\w.-]+(/[\w.-]+)+\.(py|toml|md|c|json|txt|yml)|[A-Z]\w+\.md|Makefile|pyproject\.toml|\.ci/run"
)
CI_FILES = ("docs/ci/github-actions.yml", "docs/ci/gitlab-ci.yml", "docs/ci/Jenkinsfile")
# Made by a run, so that a checkout need not hold them.
MADE = {
    f"benchmarks/results/{name}.json"
    for name in (
        "real_model",
        "r1_layer",
        "layers",
        "expert_policies",
        "embedded_moe",
        "firmware_story",
        "gate_errors",
    )
}
ARCHITECTURE = re.compile(r"\w+For(CausalLM|ConditionalGeneration)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return FENCE.findall(text)


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return FENCE.sub("", text)


def commands(name: str, program: str) -> list[list[str]]:
    """The arguments of every line of the document's shell blocks that runs `program`."""
    found = []
    for language, content in blocks(text_of(name)):
        assert language in ("sh", "toml", "python"), f"{name}: a block needs its language"
        if language != "sh":
            continue
        for line in content.replace("\\\n", " ").splitlines():
            tokens = shlex.split(line)
            if tokens and tokens[0].rsplit("/", 1)[-1] == program:
                found.append(tokens[1:])
    return found


def complaint(arguments: list[str]) -> str | None:
    """Why the program's own option tables refuse a command line, None when they take it."""
    command = typer.main.get_command(app)
    rest, positional = list(arguments), 0
    while rest:
        token = rest.pop(0)
        if token.startswith("-") and token != "-":
            options = [p for p in command.params if token in (*p.opts, *p.secondary_opts)]
            if not options:
                return f"{token} is no option of {command.name or 'qwen_quantize'}"
            if not getattr(options[0], "is_flag", False):
                if not rest:
                    return f"{token} needs a value"
                rest.pop(0)
        elif token in getattr(command, "commands", {}):
            command, positional = command.commands[token], 0  # type: ignore[attr-defined]
        else:
            positional += 1
    takes = [p for p in command.params if p.param_type_name == "argument"]
    most = math.inf if any(p.nargs == -1 for p in takes) else len(takes)
    if positional > most or positional < sum(1 for p in takes if p.required):
        return f"{positional} arguments for {command.name or 'qwen_quantize'}, which takes {len(takes)}"
    return None


def promised_keys(readme: str, label: str) -> tuple[set[str], dict[str, set[str]]]:
    """What the JSON table promises in the row of `label`: keys, and for some of them the keys of each item."""
    (row,) = [line for line in text_of(readme).splitlines() if line.startswith(f"| {label} | ")]
    cell = re.split("；|; for", row.removeprefix(f"| {label} |"), maxsplit=1)[0]
    items = re.findall(r"`(\w+)` ?(?:\(each ([^)]*)\)|（每项含([^）]*)）)", cell)
    inner = {key: set(CODE.findall(english + chinese)) for key, english, chinese in items}
    return set(CODE.findall(re.sub(r"\([^)]*\)|（[^）]*）", "", cell))), inner


def conditional_keys(readme: str, label: str) -> set[str]:
    """The keys, wherever in the document they stand, that the row of `label` promises for some requests only."""
    (row,) = [line for line in text_of(readme).splitlines() if line.startswith(f"| {label} | ")]
    rest = re.split("；|; for", row, maxsplit=1)[1:]
    return {span for text in rest for span in CODE.findall(text) if not span.startswith("--")}


def keys_inside(document: object) -> set[str]:
    """Every key of every object in a JSON document."""
    if isinstance(document, dict):
        return set(document) | set().union(*map(keys_inside, document.values()))
    return set().union(*map(keys_inside, document)) if isinstance(document, list) else set()


@pytest.mark.parametrize("say", LANGUAGES, ids=lambda say: say.file)
def test_tables_are_fresh(say: Language) -> None:
    text = text_of(say.file)
    made = readme_tables.refreshed(text, say, parts=("chips", "families", "methods", "layouts"))
    assert made == text, "run `python tools/readme_tables.py`"


def test_the_chips_table_says_what_chips_list_says() -> None:
    listed = json.loads(CliRunner().invoke(app, ["chips", "list", "--json"]).stdout)["chips"]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in readme_tables.chips_table(ENGLISH).splitlines()[2:]
    ]
    assert [row[0].strip("`") for row in rows] == [chip["name"] for chip in listed]
    for row, chip in zip(rows, listed, strict=True):
        assert row[2:5] == [chip["fp8"], chip["int8"], chip["int4"]]
        assert row[-1] == chip["arithmetic"]


def test_the_chinese_tables_have_a_word_for_everything() -> None:
    tables = readme_tables.chips_table(CHINESE) + readme_tables.families_table(CHINESE)
    cells = set(re.findall(r"\b[a-z_]{3,}\b", re.sub(r"`[^`]*`", "", tables)))
    assert cells <= {"generic", "mini"}, "an English word is left in a Chinese table"


def test_stale_tables_are_found_and_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in READMES:
        (tmp_path / name).write_text(text_of(name), encoding="utf-8")
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    assert readme_tables.main([]) == 0
    assert readme_tables.main(["--check"]) == 0
    changed = (tmp_path / "README.md").read_text(encoding="utf-8").replace("| `example` |", "| `sample` |")
    (tmp_path / "README.md").write_text(changed, encoding="utf-8")
    assert readme_tables.main(["--check"]) == 1
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == changed
    assert readme_tables.main([]) == 0
    assert readme_tables.main(["--check"]) == 0
    (tmp_path / "README.md").write_text(changed.replace("generated: chips", "generated: ships"))
    assert readme_tables.main(["--check"]) == 2


@pytest.mark.parametrize("say", LANGUAGES, ids=lambda say: say.file)
def test_the_measured_table_shows_every_row(say: Language, tmp_path: Path) -> None:
    path = tmp_path / "real_model.json"
    row = {"perplexity": 30.5, "rise": 0.0125, "rise_standard_error": 0.001, "kl_mean": 0.02}
    record = {
        "machine": {"cpu": "made up", "cores": 2},
        "model": "tiny",
        "rows": [
            {"name": "first", **row, "top1_agreement": 0.9},
            {"name": "second", "perplexity": 30.1, "rise": None, "rise_standard_error": None},
        ],
        "quantize_seconds": 12.4,
        "quantize_peak_memory_bytes": 3 * 2**20,
        "tokens": 4096,
        "text": "a novel",
        "calibration_tokens": 8192,
    }
    path.write_text(json.dumps(record))
    table = readme_tables.measured_table(say, path)
    assert "| first | 30.500 | +1.25 % ± 0.10 % | 0.02000 | 90.00 % |" in table
    assert "| second | 30.100 |  |  |  |" in table
    for fact in ("tiny", "a novel", "4,096", "8,192", "12", "3 MiB", "made up"):
        assert fact in table
    path.write_text("{}")
    with pytest.raises(readme_tables.ReadmeError, match=r"real_model\.json"):
        readme_tables.measured_table(say, path)
    assert "make real-model" in readme_tables.measured_table(say, tmp_path / "none.json")


MOE_RESULTS = {
    "r1_layer": [
        {"input": kind, "experts": 256, "calibrated": calibrated, "source_bytes": 11_500_000_000, "seconds": 61.25,
         "copy_seconds": 40.5, "ratio": 1.5123, "peak_memory_bytes": 3 << 29, "max_memory": "4GiB"}
        for kind, calibrated in (("fp8", False), ("bf16", True))
    ],
    "layers": {
        "experts": {
            "rows": [
                {"num_experts": count, "seconds": count / 2, "peak_memory_bytes": peak << 20, "output_bytes": 5}
                for count, peak in ((16, 500), (32, 510))
            ],
            "peak_spread": 0.02,
            "r_squared": 0.99876,
        }
    },
    "expert_policies": {
        "tokens": 20480,
        "starved": 0.25,
        "rows": [{"seed": seed, "policy": "round", "rise": seed / 1000} for seed in (1, 2)],
        "means": {"round": {"rise": 0.0015, "kl_mean": 0.0123}},
    },
    "embedded_moe": {
        "tokens": 8176, "perplexity": 53.125, "reference_perplexity": 53.0, "rise": 0.0021,
        "rise_standard_error": 0.0007, "kl_mean": 0.0035, "top1_agreement": 0.96, "router_agreement": 0.981,
    },
}  # fmt: skip


@pytest.mark.parametrize("say", LANGUAGES, ids=lambda say: say.file)
def test_results_of_mixtures_that_are_there_are_shown(say: Language, tmp_path: Path) -> None:
    assert "|" not in readme_tables.measured_moe(say, tmp_path)
    shown = {
        "r1_layer": (
            "| FP8 | 256 | ",
            "| BF16 | 256 | ",
            "11.5 GB",
            "61.2",
            "40.5",
            "1.51",
            "1.50 GiB",
            "4GiB",
        ),
        "layers": ("16, 32", "500", "510 MiB", "2.0 %", "0.9988"),
        "expert_policies": ("`round`", "+0.150 %", "+0.100", "+0.200 %", "0.012300", "25 %", "20,480"),
        "embedded_moe": ("| 53.000 | 53.125 | +0.21 % ± 0.07 % | 0.00350 | 96.00 % | 98.10 % |", "8,176"),
    }
    for count, (name, found) in enumerate(MOE_RESULTS.items(), start=1):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(found))
        text = readme_tables.measured_moe(say, tmp_path)
        assert text.count("\n| --- ") == count
        assert all(fact in text for fact in shown[name])
        assert "{" not in text
    (tmp_path / "r1_layer.json").write_text(json.dumps(MOE_RESULTS["r1_layer"][0]))  # one run, not in a list
    assert "BF16" not in readme_tables.measured_moe(say, tmp_path)
    (tmp_path / "layers.json").write_text("[]")
    with pytest.raises(readme_tables.ReadmeError, match=r"layers\.json"):
        readme_tables.measured_moe(say, tmp_path)


STORY = {
    "model": "tiny.gguf", "before": "example@1.2", "after": "example@1.3", "tokens": 20470, "verdict": "recalibrate",
    "changed": [{"text": "cast fp32->e4m3: rne -> rtz"}],
    "rows": {
        name: {"name": name, "perplexity": perplexity, "kl_mean": 0.0123, "kl_p99": 0.125}
        for name, perplexity in (("before", 40.25), ("after", 45.5), ("recalibrated", 41.125))
    },
    "unquantized_perplexity": 39.5, "recovered_fraction": 0.8333,
}  # fmt: skip
GATE = {
    "rows": [
        {"differences": "rne -> rtz", "tokens": 5000, "loss": loss, "concentrated": concentrated,
         "repetitions": 200, "alarms": alarms, "undecided": 0.0}
        for loss, concentrated, alarms in (
            (0.0, False, 0.065), (0.005, False, 0.94), (0.01, False, 0.995), (0.01, True, 1.0)
        )
    ],
    "tokens_needed": {"rne -> rtz": 4757}, "passes": True,
}  # fmt: skip


@pytest.mark.parametrize("say", LANGUAGES, ids=lambda say: say.file)
def test_the_firmware_story_is_told_where_it_is_there(say: Language, tmp_path: Path) -> None:
    assert "|" not in readme_tables.firmware_story(say, tmp_path)
    path = tmp_path / "firmware_story.json"
    path.write_text(json.dumps(STORY))
    text = readme_tables.firmware_story(say, tmp_path)
    for row in (
        "| 39.500 |  |  |",
        "| `example@1.2` | `example@1.2` | 40.250 | 0.01230 | 0.125 |",
        "| `example@1.2` | `example@1.3` | 45.500 |",
        "| `example@1.3` | `example@1.3` | 41.125 |",
    ):
        assert row in text
    for fact in ("tiny.gguf", "20,470", "`cast fp32->e4m3: rne -> rtz`", "`recalibrate`", "83 %"):
        assert fact in text
    change = {"field": "cast.overflow", "text": "cast fp32->e4m3, overflow: saturate -> nonsaturate"}
    lost = {
        "changed": [change], "tokens": 20470, "verdict": "recalibrate", "conditions": ["choose rceil"],
        "perplexity_before": 40.25, "perplexity_after": None, "rows": {"recalibrated": {"perplexity": 40.375}},
    }  # fmt: skip
    small = lost | {
        "rows": {},
        "verdict": "harmless",
        "perplexity_after": 40.5,
        "tokens": 6141,
        "conditions": [],
    }
    path.write_text(json.dumps(STORY | {"stories": [STORY, small, lost]}))
    text = readme_tables.firmware_story(say, tmp_path)
    assert f"| `{change['text']}` | 20,470 | `recalibrate` | 40.250 | ∞ | 40.375 |" in text
    assert "| 6,141 | `harmless` | 40.250 | 40.500 |  |" in text
    assert "`rceil`" in text
    path.write_text(json.dumps(STORY | {"rows": {}, "recovered_fraction": None, "verdict": "harmless"}))
    text = readme_tables.firmware_story(say, tmp_path)
    assert "`harmless`" in text
    assert "|" not in text
    path.write_text("{}")
    with pytest.raises(readme_tables.ReadmeError, match=r"firmware_story\.json"):
        readme_tables.firmware_story(say, tmp_path)


@pytest.mark.parametrize("say", LANGUAGES, ids=lambda say: say.file)
def test_the_errors_of_the_gate_are_shown_where_they_are_there(say: Language, tmp_path: Path) -> None:
    assert "|" not in readme_tables.gate(say, tmp_path)
    path = tmp_path / "gate_errors.json"
    path.write_text(json.dumps(GATE))
    text = readme_tables.gate(say, tmp_path)
    assert "| `rne -> rtz` | 5,000 | 6.5 % | 94.0 % | 99.5 % | 100.0 % |" in text
    assert all(fact in text for fact in ("200", "4,757"))
    path.write_text('{"rows": [{}]}')
    with pytest.raises(readme_tables.ReadmeError, match=r"gate_errors\.json"):
        readme_tables.gate(say, tmp_path)


def test_the_two_editions_are_in_step() -> None:
    english, chinese = (text_of(name) for name in READMES)
    assert blocks(english) == blocks(chinese)
    levels = [[len(marks) for marks, _ in HEADING.findall(prose(text))] for text in (english, chinese)]
    assert levels[0] == levels[1]
    rows = [
        [line.count("|") for line in text.splitlines() if line.startswith("|")] for text in (english, chinese)
    ]
    assert rows[0] == rows[1]
    spans = [sorted(set(CODE.findall(prose(text)))) for text in (english, chinese)]
    assert spans[0] == spans[1], "one edition names an option, key or file that the other does not"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_parse(name: str) -> None:
    for arguments in commands(name, "qwen_quantize"):
        assert complaint(arguments) is None, f"{name}: qwen_quantize {shlex.join(arguments)}"


@pytest.mark.parametrize("name", CI_FILES)
def test_the_jobs_for_ci_run_what_the_program_takes(name: str) -> None:
    found = []
    for line in re.findall(r"^\s+qwen_quantize (.*)$", text_of(name), re.MULTILINE):
        said = re.sub(
            r"\$\{\w+:\+([^}]*)\}", r"\1", re.split(r" > | \|\| ", line)[0]
        )  # ${TEXT:+--text "$TEXT"}
        found.append(shlex.split(said))
        assert complaint(found[-1]) is None, line
    assert {"probe", "eval", "compare", "report", "regress"} <= {arguments[0] for arguments in found}
    gates = [arguments for arguments in found if "--junit" in arguments]
    assert gates
    assert all({"regress", "--before", "--after"} <= set(arguments) for arguments in gates)
    assert all(arguments[arguments.index("--junit") + 1] == "regress.xml" for arguments in gates)
    for readme in READMES:
        assert f"]({name})" in text_of(readme)


def test_python_in_the_readme_runs() -> None:
    programs = [content for language, content in blocks(text_of("README.md")) if language == "python"]
    assert programs
    for program in programs:
        exec(compile(program, "README.md", "exec"), {})


def test_the_readme_shows_every_command() -> None:
    shown = {word for arguments in commands("README.md", "qwen_quantize") for word in arguments}
    assert {
        "eval",
        "regress",
        "probe",
        "bench",
        "generate",
        "report",
        "chips",
        "list",
        "show",
        "validate",
    } <= shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--devise", "ascend"],
        ["eval", "OUT", "--tokens", "3"],
        ["eval"],
        ["--device"],
        ["chips", "show"],
        ["OUT"],
    ],
)
def test_commands_that_do_not_parse_are_noticed(arguments: list[str]) -> None:
    assert complaint(arguments) is not None


@pytest.mark.parametrize("name", DOCUMENTS)
def test_options_in_the_prose_exist(name: str) -> None:
    command = typer.main.get_command(app)
    known = {"--check"}  # tools/readme_tables.py
    waiting = [command]
    while waiting:
        current = waiting.pop()
        known |= {option for p in current.params for option in (*p.opts, *p.secondary_opts)}
        waiting += getattr(current, "commands", {}).values()
    named = {
        m for span in CODE.findall(prose(text_of(name))) for m in re.findall(r"(?:^|\s)(--[a-z-]+)", span)
    }
    assert named <= known


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    named = {arguments[0] for arguments in commands(name, "make")}
    named |= {span.split()[1] for span in CODE.findall(prose(text_of(name))) if span.startswith("make ")}
    assert named <= targets


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_file_names_exist(name: str) -> None:
    text = prose(text_of(name))
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        assert "://" not in path
        if path:
            assert ((ROOT / name).parent / path).is_file(), f"{name}: {target}"
        elif anchor:
            slugs = {
                re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for _, title in HEADING.findall(text)
            }
            assert anchor in slugs, f"{name}: {target}"
    for span in CODE.findall(text):
        if FILE.fullmatch(span) and span not in MADE and not name.endswith("LICENSE-DATA.md"):
            assert (ROOT / span).is_file(), f"{name}: `{span}` does not exist"


@pytest.mark.parametrize("name", [*DOCUMENTS, *CI_FILES])
def test_words_that_have_no_place_here(name: str) -> None:
    text = text_of(name)
    if name.endswith("Jenkinsfile"):
        text = text.replace("\n  agent any\n", "\n", 1)  # a word of Jenkins' own grammar
    for pattern in (
        r"(?<![\w./:])/(?:work|home|root|tmp|usr|opt|mnt|var|etc|venv)\b",  # absolute paths
        r"\.\./",
        r"\bissue \d",
        r"(?i)\b(?:sub)?agents?\b|\bsessions?\b|\bhelpers?\b|\bAI assistant",
        r"(?i)\bTODO\b|\bFIXME\b",
        r"[\U0001F300-\U0001FAFF\u2600-\u27BF]",  # emojis
    ):
        found = re.search(pattern, text)
        assert found is None, f"{name}: {found.group(0)!r}" if found else ""


@pytest.mark.parametrize("name", READMES)
def test_lists_in_the_prose_are_those_of_the_code(name: str) -> None:
    spans = set(CODE.findall(prose(text_of(name))))
    assert set(ASSUMABLE) <= spans
    assert {span for span in spans if ARCHITECTURE.fullmatch(span)} == set(BY_ARCHITECTURE)
    policies = re.search(r"`--expert-policy`.*?\n- ", prose(text_of(name)), re.DOTALL)
    assert policies is not None
    assert set(EXPERT_POLICIES) <= set(CODE.findall(policies[0]))


def test_promised_json_keys_are_there(tmp_path: Path) -> None:
    model, out, text = tmp_path / "model", tmp_path / "out", tmp_path / "text.txt"
    make_tiny(model, "qwen3", seed=3)
    make_tokenizer(model)
    text.write_text(words(300))
    profile = str(ROOT / "qwen_quantize" / "chip_profiles" / "example.toml")
    quantize = ["--model-path", str(model), "--output-path", str(out), "--device", "ascend",
                "--validation-text", str(text), "--validation-tokens", "128", "--json"]  # fmt: skip
    runs = {
        ("quantize with `--dry-run`", "量化加 `--dry-run`"): [*quantize, "--dry-run"],
        ("quantize", "量化"): quantize,
        ("`eval`", "`eval`"): ["eval", str(out), "--text", str(text), "--max-tokens", "64", "--length", "32", "--json"],
        ("`regress`", "`regress`"): ["regress", str(out), "--before", "example@1.2", "--after", "example@1.3",
                                     "--text", str(text), "--max-tokens", "64", "--json"],
        ("`probe`", "`probe`"): ["probe", "--on", "emulated:example@1.3", "--quick", "--json"],
        ("`bench`", "`bench`"): ["bench", str(out), "--prompt-tokens", "4", "--new-tokens", "2", "--json"],
        ("`chips show`", "`chips show`"): ["chips", "show", "example", "--json"],
        ("`chips list`", "`chips list`"): ["chips", "list", "--json"],
        ("`chips validate`", "`chips validate`"): ["chips", "validate", profile, "--json"],
    }  # fmt: skip
    for labels, arguments in runs.items():
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code in ((0, 1) if arguments[0] == "regress" else (0,)), result.output
        record = json.loads(result.stdout)
        for readme, label in zip(READMES, labels, strict=True):
            keys, inner = promised_keys(readme, label)
            assert keys
            assert keys <= set(record), f"{readme}: {label} does not print {sorted(keys - set(record))}"
            for key, promised in inner.items():
                assert promised
                assert record[key], f"{label} prints no {key} here, so nothing holds their keys"
                assert promised <= set(record[key][0]), f"{readme}: the items of {key} in {label}"
    # With this margin nothing is harmless but a gain, which truncation happens to be for this model.
    hurt = ["regress", str(out), "--before", "example@1.3", "--after", "example@1.2", "--margin", "0.0001%",
            "--text", str(text), "--max-tokens", "64", "--recalibrate", str(tmp_path / "again"), "--json"]  # fmt: skip
    more = {
        "`eval`": [*runs["`eval`", "`eval`"], "--record", str(tmp_path / "run.safetensors"), "--attribute"],
        "`regress`": hurt,
        "`chips show`": ["chips", "show", "ascend", "--json"],
        "`bench`": [*runs["`bench`", "`bench`"], "--model-of", "example"],
    }
    for label, arguments in more.items():
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code in (0, 1), result.output
        found = keys_inside(json.loads(result.stdout))
        for readme in READMES:
            promised = conditional_keys(readme, label)
            assert promised
            assert promised <= found, f"{readme}: {label} does not print {sorted(promised - found)}"
    others = {labels for labels in runs if labels[0] not in more}
    assert not any(conditional_keys(*pair) for labels in others for pair in zip(READMES, labels, strict=True))


def test_python_versions_agree() -> None:
    (wanted,) = re.findall(r'requires-python = ">=(\d+\.\d+)"', text_of("pyproject.toml"))
    assert all(f"Python {wanted}" in text_of(name) for name in READMES)


def test_changelog_names_this_version() -> None:
    import qwen_quantize

    versions = re.findall(r"^## \[?(\d+\.\d+\.\d+)", text_of("CHANGELOG.md"), re.MULTILINE)
    assert versions
    assert versions[0] == qwen_quantize.__version__
    keys = [tuple(map(int, version.split("."))) for version in versions]
    assert all(a > b for a, b in itertools.pairwise(keys))
