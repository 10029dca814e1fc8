"""Recipes: what their rules mean, what is wrong with them, and that a result's own can be run again."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from qwen_quantize.calibrators.experts import ExpertPolicy
from qwen_quantize.calibrators.problem import Effort
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.plan import Plan, make_plan
from qwen_quantize.pipeline.recipe import Recipe, Rule
from qwen_quantize.pipeline.recipe_file import with_recipe
from qwen_quantize.pipeline.rules import settings_of
from tests.cli.test_resume import hashes
from tests.pipeline.test_methods import invoke, make, run
from tests.tiny_models import words


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("recipes") / "model", "qwen3")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "calib.jsonl"
    file.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(6)))
    return file


def planned(model: Path, *rules: Rule, **fields: Any) -> Plan:
    asked = {"method": "rtn", "group_size": 64, **fields}
    return make_plan(Recipe(str(model), "nvidia-h100", rules=rules, **asked), open_source(model))


def written(folder: Path, content: str) -> Path:
    file = folder / "recipe.toml"
    file.write_text(content)
    return file


def test_later_rules_win_and_say_only_what_they_change(model: Path) -> None:
    plan = planned(
        model,
        Rule("*.mlp.*", scheme="w8a16"),
        Rule("model.layers.1.mlp.*", scheme="w4a16", group_size=32),
        Rule("re:layers\\.1\\.mlp\\.down", symmetric=False),
        Rule("model.layers.0.*", ignore=True),
        Rule("model.layers.0.self_attn.o_proj", ignore=False),
    )
    grids = {
        name: (choice.scheme.name, choice.scheme.weight.granularity.cols, choice.scheme.weight.symmetric)
        for name, choice in plan.choices.items()
    }
    assert grids["model.layers.1.self_attn.q_proj"] == ("w4a16", 64, True)
    assert grids["model.layers.1.mlp.gate_proj"] == ("w4a16", 32, True)
    assert grids["model.layers.1.mlp.down_proj"] == ("w4a16", 32, False)
    assert [name for name in grids if name.startswith("model.layers.0.")] == [
        "model.layers.0.self_attn.o_proj"
    ]
    assert "model.layers.0.mlp.down_proj" in plan.selection.kept
    assert plan.scheme.weight.granularity.cols == 64  # of the request


def test_a_rule_that_changes_the_scheme_starts_anew_with_the_grid() -> None:
    recipe = Recipe("m", "cpu", "awq", group_size=32, asymmetric=True, rules=(Rule("a", method="w8a8"),))
    found = settings_of(recipe, ["a", "b"])
    changed = found["a"].applied_to(recipe)
    assert (changed.method, changed.scheme, changed.group_size, changed.asymmetric) == (
        "w8a8",
        "w8a8",
        None,
        False,
    )
    assert found["b"].applied_to(recipe) == recipe
    same = Recipe("m", "cpu", "awq", group_size=32, rules=(Rule("a", method="gptq"),))
    assert settings_of(same, ["a"])["a"].applied_to(same).group_size == 32


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((Rule("*.down_porj", scheme="w8a16"),), "rule 1 .*matches no linear.*'down_proj'"),
        ((Rule("q_proj", scheme="w8a16"),), "q_proj.*k_proj.*run them as one product"),
        ((Rule("*.mlp.*", method="gptq"),), "gptq calibrates on text"),
        ((Rule("*", method="gptk"),), "'gptk' is not one of the methods"),
        ((Rule("*", scheme="w3a16"),), "'w3a16' is not one of the schemes"),
        ((Rule("*.mlp.*", scheme="w8a8"), Rule("down_proj", group_size=32)), "--group-size does not apply to w8a8"),
        ((Rule("gate_proj", ignore=True),), "gate_proj.*siblings"),
        ((Rule("re:(", ignore=True),), "not a regular expression"),
        ((Rule("down_proj", scheme="mxfp4"),), "nvidia-h100 cannot run mxfp4"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_anything_runs(
    model: Path, rules: tuple[Rule, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        planned(model, *rules)


def test_what_engines_fuse_of_a_delta_net_stays_together(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "qwen3.5")
    with pytest.raises(UserError, match="in_proj_z but quantize its siblings"):
        planned(model, ignore=("*.in_proj_z",), group_size=32)
    plan = planned(model, ignore=("*.in_proj_z", "*.in_proj_qkv"), group_size=16)
    assert not [name for name in plan.choices if "in_proj" in name]


def test_a_layout_with_room_for_one_scheme_says_so(model: Path) -> None:
    with pytest.raises(UserError, match="layout awq holds one scheme for all linears"):
        planned(model, Rule("down_proj", group_size=32), layout="awq")


def test_shared_and_routed_experts_need_one_way_to_observe(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "deepseek-v3")
    with pytest.raises(UserError, match="shared and routed experts read one input"):
        planned(model, Rule("*shared_experts.*", scheme="w8a8"), group_size=32)
    plan = planned(model, Rule("*.experts.*", scheme="w8a16", group_size=32), group_size=32)
    assert plan.scheme_of("model.layers.1.mlp.experts.3.up_proj").name == "w8a16"
    assert plan.scheme_of("model.layers.1.mlp.shared_experts.up_proj").name == "w4a16"
    with pytest.raises(UserError, match="run them as one product"):
        planned(model, Rule("*.experts.3.*", scheme="w8a16", group_size=32), group_size=32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[defaults", "is no TOML"),
        ("x = 1", "unknown key 'x'; known are defaults, rule"),
        ("defaults = 3", "'defaults' must be a table"),
        ("[defaults]\nbits = 4", "unknown key 'bits'"),
        ("[defaults]\ngroup_size = '64'", "'group_size' must be a whole number"),
        ("[defaults]\nsymmetric = 1", "'symmetric' must be true or false"),
        ("[rule]\nmatch = 'a'", r"rules must be tables, each under \[\[rule\]\]"),
        ("[[rule]]\nignore = true", "rule 1 has no 'match'"),
        ("[[rule]]\nmatch = 'a'", "says nothing beside"),
        ("[[rule]]\nmatch = ''\nignore = true", "'match' must be a text"),
        ("[[rule]]\nmatch = 'a'\nignore = 'yes'", "'ignore' must be true or false"),
        ("[[rule]]\nmatch = 'a'\nmethods = 'awq'", "unknown key 'methods'"),
    ],
)
def test_a_damaged_recipe_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        with_recipe(Recipe("m", "cpu", "rtn"), written(tmp_path, content), set())
    assert "\n" not in str(caught.value).replace(content, "")


REQUEST = '{"tool": {}, "request": {"model_path": "m", "device": "d", %s}}'


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"request": 3}',
        '{"tool": {}, "request": {}}',
        REQUEST % '"method": 3',
        REQUEST % '"method": "x", "unknown": 1',
        REQUEST % '"method": "x", "rules": [{"match": 1}]',
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "qwen_quantize.json"
    file.write_text(content)
    with pytest.raises(UserError, match=r"qwen_quantize\.json"):
        with_recipe(Recipe("m", "cpu", "rtn"), file, set())


def test_the_command_line_is_laid_over_the_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "[defaults]\nmethod = 'gptq'\ngroup_size = 64\nsymmetric = false")
    asked = Recipe("m", "cpu", "ue8m0", group_size=32)
    assert with_recipe(asked, file, {"group_size"}) == Recipe(
        "m", "cpu", "gptq", group_size=32, asymmetric=True
    )


def test_a_recipe_end_to_end_and_again_from_its_manifest(model: Path, text: Path, tmp_path: Path) -> None:
    """Two methods, three schemes and a layer that stays; run again, the manifest gives the same bytes."""
    recipe = written(
        tmp_path,
        """
        [defaults]
        method = "awq"
        group_size = 64

        [[rule]]
        match = "*.down_proj"
        method = "w8a8"

        [[rule]]
        match = "model.layers.1.self_attn.*"
        scheme = "w4a16"
        group_size = 32

        [[rule]]
        match = "model.layers.0.self_attn.*"
        ignore = true
        """,
    )
    common = ["--calibration-dataset", text, "--calibration-length", 32, "--calibration-samples", 8]
    common += ["--device", "nvidia-h100"]
    held_out = tmp_path / "held-out.txt"
    held_out.write_text(words(400, seed=50))
    validation = ["--validation-text", held_out, "--validation-tokens", 256]
    out, again = tmp_path / "out", tmp_path / "again"
    record = run("--model-path", model, "--output-path", out, "--recipe", recipe, *common, *validation)
    assert record["validation"]["kl_mean"] < 0.1
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert len(config["config_groups"]) == 3
    assert {group["format"] for group in config["config_groups"].values()} == {
        "pack-quantized",
        "int-quantized",
    }
    tensors = load_file(out / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in tensors
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    linears = [linear for layer in manifest["layers"] for linear in layer["linears"]]
    for linear in linears:
        stored = [tensor for name, tensor in tensors.items() if name.startswith(linear["name"] + ".")]
        assert linear["bits"] == 8 * sum(tensor.nbytes for tensor in stored)
    assert {linear["scheme"] for linear in linears if "down_proj" in linear["name"]} == {"w8a8"}
    run("--recipe", out / "qwen_quantize.json", "--output-path", again, *validation)
    assert hashes(again) == hashes(out)


def test_another_group_size_over_a_manifest(model: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    run("--model-path", model, "--output-path", out, "--quant-method", "rtn", "--group-size", 64, "--device", "cpu",
        "--no-validate")  # fmt: skip
    run("--recipe", out / "qwen_quantize.json", "--output-path", again, "--group-size", 32, "--no-validate")
    assert json.loads((again / "qwen_quantize.json").read_text())["scheme"]["group_size"] == 32


OVER_A_MANIFEST: dict[str, tuple[list[str], object]] = {
    "model_path": (["--model-path", "other"], "other"),
    "device": (["--device", "ascend"], "ascend"),
    "method": (["--quant-method", "w8a8"], "w8a8"),
    "dataset": (["--calibration-dataset", "b.jsonl"], "b.jsonl"),
    "column": (["--calibration-dataset", "b.jsonl", "--calibration-column", "words"], "words"),
    "statistics": (["--from-statistics", "folder"], "folder"),
    "samples": (["--calibration-samples", "5"], 5),
    "length": (["--calibration-length", "24"], 24),
    "seed": (["--seed", "3"], 3),
    "expert_policy": (["--expert-policy", "round"], ExpertPolicy.ROUND),
    "ignore": (["--ignore", "*.down_proj"], ("*.down_proj",)),
    "include": (["--include", "*.up_proj"], ("*.up_proj",)),
    "block_size": (["--block-size", "64"], 64),
    "scheme": (["--scheme", "w8a16"], "w8a16"),
    "group_size": (["--group-size", "32"], 32),
    "asymmetric": (["--asymmetric"], True),
    "layout": (["--layout", "awq"], "awq"),
    "kv_cache": (["--kv-cache", "fp8"], "fp8"),
    "versions": (["--driver", "9.9"], (("driver", "9.9"), ("firmware", "1"))),
    "assume": (["--assume", "scale.amax_epsilon=0"], (("scale.amax_epsilon", "0"),)),
    "with_claims": (["--with-claims"], True),
    "allow_unsupported": (["--allow-unsupported"], True),
    "max_memory": (["--max-memory", "1GiB"], 1 << 30),
    "effort": (["--effort", "high"], Effort.HIGH),
    "rotate": (["--rotate", "r2"], "r2"),
}
WITHOUT_OPTION = {"max_shard_bytes", "rules"}


def test_every_field_of_a_request_is_tried_over_a_manifest() -> None:
    assert OVER_A_MANIFEST.keys() == {field.name for field in fields(Recipe)} - WITHOUT_OPTION


@pytest.mark.parametrize("name", OVER_A_MANIFEST)
def test_an_option_wins_over_a_manifest(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Recipe("model", "cpu", "rtn", dataset="a.jsonl", column="text", kv_cache="int8", ignore=("*.q_proj",),
                  versions=(("firmware", "1"),), rules=(Rule("*", scheme="w4a16"),))  # fmt: skip
    manifest = tmp_path / "qwen_quantize.json"
    manifest.write_text(json.dumps({"tool": {}, "request": kept.as_record()}))
    asked: list[Recipe] = []
    monkeypatch.setattr(
        "qwen_quantize.cli.quantize.run_quantize", lambda recipe, *_, **__: asked.append(recipe)
    )
    options, value = OVER_A_MANIFEST[name]
    result = invoke("--recipe", manifest, "--output-path", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    (found,) = asked
    assert getattr(found, name) == value != getattr(kept, name)
    told = {"dataset", "column", "statistics"} if name in ("dataset", "column", "statistics") else {name}
    assert replace(found, **{one: getattr(kept, one) for one in told}) == kept


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", {"firmware": "1", "driver": "9.9"}), ("ascend", {"driver": "9.9"})],
)
def test_versions_of_one_chip_are_not_laid_over_anothers(
    device: str, expected: dict[str, str], tmp_path: Path
) -> None:
    manifest = tmp_path / "qwen_quantize.json"
    kept = Recipe("model", "cpu", "rtn", versions=(("firmware", "1"),))
    manifest.write_text(json.dumps({"tool": {}, "request": kept.as_record()}))
    asked = Recipe("", device, "rtn", versions=(("driver", "9.9"),))
    assert dict(with_recipe(asked, manifest, {"device", "versions"}).versions) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "nowhere.toml"], "is no file"),
        (["--target-bits", "4.5", "--max-loss", "1%"], "give one of them"),
        (["--candidates", "w8a16"], "give one of these"),
        (["--target-bits", "-1"], "positive number"),
        (["--max-loss", "much"], "0.5% or 0.005"),
        (["--target-bits", "4.5", "--candidates", "w8a16,w8a16"], "twice"),
        (["--target-bits", "4.5", "--quant-method", "rtn"], "give --calibration-dataset"),
        (["--target-bits", "4.5", "--dry-run"], "reads no weights"),
    ],
)
def test_wrong_options_end_with_code_two(
    model: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = invoke("--model-path", model, "--device", "cpu", "--output-path", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not list(tmp_path.iterdir())
