"""Names on the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

import fedfa
from fedfa import UserError
from fedfa.experiment import REGISTRIES, complete
from fedfa.registry import Registry, nearest


def numbers() -> Registry[object]:
    return Registry("number", {"pi": ("math:pi", "3.14"), "tau": ("math:tau", "6.28")})


@pytest.mark.parametrize(
    ("name", "known", "wanted"),
    [
        ("fedavgg", ["fedavg", "fedfa"], "did you mean 'fedavg'?"),
        ("momentom", ["lr", "momentum"], "did you mean 'momentum'?"),
        ("zzz", ["fedavg", "fedfa"], "known are fedavg, fedfa"),
        ("zzz", [], "known are none"),
    ],
)
def test_nearest(name: str, known: list[str], wanted: str) -> None:
    assert nearest(name, known) == wanted


def test_an_entry_is_imported_when_it_is_asked_for() -> None:
    sys.modules.pop("colorsys", None)
    registry: Registry[object] = Registry("thing", {"hsv": ("colorsys:rgb_to_hsv", "a function")})
    assert list(registry) == ["hsv"] and registry.lines == {"hsv": "a function"} and len(registry) == 1
    assert "colorsys" not in sys.modules
    found = registry["hsv"]
    assert callable(found) and found.__name__ == "rgb_to_hsv"
    assert registry.find("hsv") is found


def test_it_is_a_mapping() -> None:
    registry = numbers()
    assert isinstance(registry, Mapping)
    assert registry["pi"] == pytest.approx(3.14159, abs=1e-5)
    assert registry.get("rho") is None
    with pytest.raises(KeyError):
        registry["rho"]


def test_an_unknown_name_is_the_user_s_mistake() -> None:
    with pytest.raises(UserError, match=r"^no number is named 'taw'; did you mean 'tau'\?$"):
        numbers().find("taw")


def test_register_adds_an_object_or_the_name_of_one() -> None:
    registry = numbers()
    registry.register("three", 3, "3")
    registry.register("e", "math:e", "2.72")
    assert registry.find("three") == 3
    assert registry["e"] == pytest.approx(2.71828, abs=1e-5)
    assert registry.lines["e"] == "2.72" and list(registry) == ["pi", "tau", "three", "e"]


def test_a_name_is_given_once() -> None:
    registry = numbers()
    with pytest.raises(ValueError, match="there is a number named 'pi' already"):
        registry.register("pi", 3, "in Indiana")
    assert registry["pi"] != 3


@pytest.mark.parametrize("component", list(REGISTRIES))
def test_every_entry_exists_has_a_line_and_has_settings_with_defaults(component: str) -> None:
    registry = REGISTRIES[component]
    assert set(registry.lines) == set(registry)
    for name in registry:
        assert registry.lines[name] and "\n" not in registry.lines[name]
        table = complete(component, name)
        assert table.pop("name") == name
        assert table == {key: value for key, value in table.items() if not isinstance(value, type)}


def test_the_package_s_registries_are_the_experiment_s() -> None:
    assert REGISTRIES["algorithm"] is fedfa.ALGORITHMS
    assert REGISTRIES["network"] is fedfa.NETWORKS
    assert REGISTRIES["source"] is fedfa.SOURCES
    assert REGISTRIES["augmentation"] is fedfa.AUGMENTATIONS
