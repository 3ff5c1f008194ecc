"""ferrorpc also runs from a folder of sources, which has no installed distribution."""

from importlib.metadata import PackageNotFoundError, version

import pytest
from ferrorpc_coordinator import metrics

from ferrorpc import versions


def test_an_installed_package_has_a_version_and_another_has_none() -> None:
    assert versions.version_of("grpcio") == version("grpcio")
    assert versions.version_of("no-such-package") == ""


def test_without_a_distribution_the_version_is_unknown_and_a_coordinator_tells_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(package: str) -> str:
        if package == "ferrorpc":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(versions, "version", installed)
    (sample,) = metrics.build_info().samples
    assert (versions.own_version(), sample.labels["version"]) == ("0+unknown", "0+unknown")
    assert sample.labels["grpcio"] == version("grpcio")
