"""The knobs: what is refused and how, presets, and how layers combine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ram_trl import MergeConfig
from ram_trl.config import METHOD_KNOBS, read_yaml

REFUSED = [
    pytest.param({"method": "slerp"}, ["method", "slerp", "ram", "ties"], id="unknown method"),
    pytest.param({"epsilon": -1e-5}, ["epsilon", "-1e-05"], id="negative epsilon"),
    pytest.param({"top": 0}, ["top", "0"], id="top 0"),
    pytest.param({"top": -0.2}, ["top", "-0.2"], id="negative top"),
    pytest.param({"top": 1.5}, ["top", "1.5"], id="top above 1"),
    pytest.param({"r": -0.1}, ["r", "-0.1"], id="negative r"),
    pytest.param({"alpha": -1.0}, ["alpha", "-1.0"], id="negative alpha"),
    pytest.param({"rho": "layer"}, ["rho", "layer", "global", "tensor"], id="unknown rho"),
    pytest.param({"method": "dare", "drop": 1.0}, ["drop", "1.0"], id="drop 1"),
    pytest.param({"method": "dare", "drop": -0.1}, ["drop", "-0.1"], id="negative drop"),
    pytest.param({"method": "dare", "seed": -1}, ["seed", "-1"], id="negative seed"),
    pytest.param({"epsilon": "small"}, ["epsilon", "small"], id="epsilon in words"),
    pytest.param({"densty": 0.5}, ["densty", "0.5"], id="unknown key"),
    pytest.param({"weights": {"tool": 0}}, ["weight", "'tool'", "0"], id="weight 0"),
    pytest.param({"weights": {"tool": math.inf}}, ["weight", "'tool'", "inf"], id="weight inf"),
    pytest.param({"weights": {"tool": math.nan}}, ["weight", "'tool'", "nan"], id="weight nan"),
    pytest.param({"weights": {"tool": "heavy"}}, ["weights", "tool", "heavy"], id="weight in words"),
    pytest.param({"epsilon": 1e-5, "top": 0.2}, ["epsilon=1e-05", "top=0.2"], id="epsilon and top"),
    pytest.param({"epsilon": 0.0, "ulp": True}, ["epsilon=0.0", "ulp"], id="epsilon and ulp"),
    pytest.param({"top": 0.3, "ulp": True}, ["top=0.3", "ulp"], id="top and ulp"),
    pytest.param({"method": "ties", "r": 0.1}, ["'ties'", "r=0.1", "ram"], id="r with ties"),
    pytest.param({"method": "average", "scale": 0.7}, ["'average'", "scale=0.7"], id="scale with average"),
    pytest.param({"method": "ram", "drop": 0.25}, ["'ram'", "drop=0.25", "dare"], id="drop with ram"),
    pytest.param({"method": "task_arithmetic", "seed": 3}, ["'task_arithmetic'", "seed=3"], id="seed without dare"),
    pytest.param({"preset": "ours"}, ["preset", "'ours'", "paper", "released", "mergekit"], id="unknown preset"),
    pytest.param({"weights": 0.5}, ["weights", "0.5"], id="weights that are not by agent"),
    pytest.param({"preset": ["paper"]}, ["preset", "['paper']"], id="preset in a list"),
]


def assert_refused(error: pytest.ExceptionInfo[ValueError], told: list[str]) -> None:
    for words in told:
        assert words in str(error.value)


@pytest.mark.parametrize(("knobs", "told"), REFUSED)
def test_a_bad_knob_is_refused_by_name_and_value(knobs: dict[str, Any], told: list[str]):
    with pytest.raises(ValueError, match=r"\w") as error:
        MergeConfig.layered(knobs)
    assert_refused(error, told)


@pytest.mark.parametrize(("knobs", "told"), [case for case in REFUSED if "preset" not in case.values[0]])
def test_a_bad_knob_in_a_later_layer_is_refused_too(knobs: dict[str, Any], told: list[str]):
    with pytest.raises(ValueError, match=r"\w") as error:
        MergeConfig.layered({"weights": {"code": 2.0}}, knobs)
    assert_refused(error, told)


@pytest.mark.parametrize(
    ("method", "knob"),
    [("ram", "epsilon"), ("ram", "top"), ("ram", "r"), ("ram", "alpha"), ("ties", "scale"), ("dare", "drop")],
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused(method: str, knob: str, value: float):
    with pytest.raises(ValueError, match=knob) as error:
        MergeConfig(method=method, **{knob: value})
    assert_refused(error, [str(value)])


@pytest.mark.parametrize("method", METHOD_KNOBS)
def test_every_method_takes_its_own_knobs_and_no_others(method: str):
    values = {"r": 0.3, "alpha": 0.5, "rho": "tensor", "scale": 0.9, "drop": 0.2, "seed": 4}
    own = {
        "ram": {"r", "alpha", "rho"},
        "average": set(),
        "task_arithmetic": {"scale"},
        "ties": {"scale"},
        "dare": {"scale", "drop", "seed"},
    }[method]
    for knob, value in values.items():
        if knob in own:
            assert getattr(MergeConfig(method=method, **{knob: value}), knob) == value
        else:
            with pytest.raises(ValueError, match=f"'{method}' does not use {knob}"):
                MergeConfig(method=method, **{knob: value})


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        MergeConfig().r = 0.3


# --- defaults and presets --------------------------------------------------------------------------------------------


def test_the_default_is_ram_plus_with_our_numbers():
    config = MergeConfig()
    assert (config.method, config.r, config.alpha, config.rho) == ("ram", 0.2, 1.0, "global")
    assert config.top_fraction == 0.2
    assert config.weight("tool") == 1.0


@pytest.mark.parametrize(
    ("method", "criterion"),
    [
        ("ram", "top 0.2"),
        ("ties", "top 0.2"),
        ("average", "epsilon 0"),
        ("task_arithmetic", "epsilon 0"),
        ("dare", "epsilon 0"),
    ],
)
def test_the_default_criterion_depends_on_the_method(method: str, criterion: str):
    assert MergeConfig(method=method).criterion == criterion


@pytest.mark.parametrize(
    ("knobs", "criterion"),
    [
        ({"epsilon": 1e-5}, "epsilon 1e-05"),
        ({"epsilon": 0}, "epsilon 0"),
        ({"top": 0.35}, "top 0.35"),
        ({"ulp": True}, "ulp"),
    ],
)
def test_a_criterion_that_is_given_replaces_the_default(knobs: dict[str, Any], criterion: str):
    for method in METHOD_KNOBS:
        assert MergeConfig(method=method, **knobs).criterion == criterion


@pytest.mark.parametrize(
    ("name", "r", "alpha", "rho"),
    [("paper", 0.1, 2.0, "global"), ("released", 0.2, 1.0, "global"), ("mergekit", 0.1, 0.2, "tensor")],
)
def test_presets_are_the_published_numbers(name: str, r: float, alpha: float, rho: str):
    config = MergeConfig.preset(name)
    assert (config.method, config.epsilon, config.top_fraction, config.ulp) == ("ram", 1e-5, None, False)
    assert (config.r, config.alpha, config.rho) == (r, alpha, rho)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'theirs'.*paper, released, mergekit"):
        MergeConfig.preset("theirs")


# --- layers ----------------------------------------------------------------------------------------------------------


def test_the_later_layer_wins():
    config = MergeConfig.layered({"r": 0.1, "alpha": 2.0}, {"r": 0.3}, {})
    assert (config.r, config.alpha) == (0.3, 2.0)


def test_no_layers_are_the_defaults():
    assert MergeConfig.layered() == MergeConfig()


@pytest.mark.parametrize("earlier", [{"epsilon": 1e-5}, {"top": 0.1}, {"ulp": True}, {"preset": "paper"}])
@pytest.mark.parametrize(
    ("later", "criterion"), [({"epsilon": 0.5}, "epsilon 0.5"), ({"top": 0.4}, "top 0.4"), ({"ulp": True}, "ulp")]
)
def test_a_later_criterion_replaces_an_earlier_one_of_any_kind(
    earlier: dict[str, Any], later: dict[str, Any], criterion: str
):
    assert MergeConfig.layered(earlier, later).criterion == criterion


def test_two_criteria_in_one_layer_are_refused():
    with pytest.raises(ValueError, match=r"epsilon=1e-05 and top=0\.2"):
        MergeConfig.layered({"ulp": True}, {"epsilon": 1e-5, "top": 0.2})


@pytest.mark.parametrize("off", [{"ulp": False}, {"epsilon": None}, {"top": None}])
def test_a_criterion_that_is_switched_off_replaces_nothing(off: dict[str, Any]):
    earlier = {"epsilon": 1e-5} if "epsilon" not in off else {"top": 0.1}
    assert MergeConfig.layered(earlier, off).criterion == MergeConfig(**earlier).criterion


def test_weights_are_merged_by_agent():
    config = MergeConfig.layered({"weights": {"tool": 0.5, "code": 2.0}}, {"weights": {"tool": -1.0}}, {"r": 0.1})
    assert config.weights == {"tool": -1.0, "code": 2.0}


def test_a_preset_is_overridden_knob_by_knob():
    config = MergeConfig.layered({"preset": "paper"}, {"r": 0.5})
    assert (config.epsilon, config.r, config.alpha) == (1e-5, 0.5, 2.0)


def test_a_knob_beside_a_preset_overrides_it():
    config = MergeConfig.layered({"preset": "paper", "r": 0.5})
    assert (config.epsilon, config.r, config.alpha) == (1e-5, 0.5, 2.0)


def test_a_criterion_beside_a_preset_overrides_that_of_the_preset():
    config = MergeConfig.layered({"preset": "paper", "top": 0.1})
    assert (config.criterion, config.r, config.alpha) == ("top 0.1", 0.1, 2.0)


def test_a_preset_in_a_later_layer_overrides_the_knobs_it_names():
    config = MergeConfig.layered({"top": 0.1, "r": 0.7, "weights": {"tool": 0.5}}, {"preset": "released"})
    assert (config.criterion, config.r, config.weights) == ("epsilon 1e-05", 0.2, {"tool": 0.5})


def test_layers_are_left_as_they_were():
    layers = [{"weights": {"tool": 0.5}}, {"preset": "paper", "weights": {"code": 2.0}}]
    MergeConfig.layered(*layers)
    assert layers == [{"weights": {"tool": 0.5}}, {"preset": "paper", "weights": {"code": 2.0}}]


# --- YAML ------------------------------------------------------------------------------------------------------------


def test_yaml_holds_the_knobs(tmp_path: Path):
    file = tmp_path / "merge.yaml"
    file.write_text("method: ram\nepsilon: 1e-5\nweights:\n  tool: 0.5\n", encoding="utf-8")
    config = MergeConfig(**read_yaml(file))
    assert (config.epsilon, config.weights) == (1e-5, {"tool": 0.5})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(b"method: [ram", "cannot be read", id="no YAML"),
        pytest.param(b"\xff\xfe\x00", "cannot be read", id="no text"),
        pytest.param(b"- ram\n- ties\n", "list", id="a list"),
        pytest.param(b"ram\n", "str", id="a word"),
        pytest.param(b"", "mapping", id="empty"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_refused_by_its_path(tmp_path: Path, content: bytes, told: str):
    file = tmp_path / "merge.yaml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=told) as error:
        read_yaml(file)
    assert str(file) in str(error.value)


def test_a_missing_file_is_refused_by_its_path(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no such file") as error:
        read_yaml(tmp_path / "nowhere.yaml")
    assert str(tmp_path / "nowhere.yaml") in str(error.value)
