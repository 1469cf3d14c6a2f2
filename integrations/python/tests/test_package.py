"""The installed package's metadata."""

from importlib import metadata


def test_the_licences_are_in_the_package():
    package = metadata.distribution("marlinspike")
    assert package.metadata.get_all("License-File") == ["LICENSE-APACHE", "LICENSE-MIT"]
    assert "Apache License" in package.read_text("licenses/LICENSE-APACHE")
    assert "without restriction" in package.read_text("licenses/LICENSE-MIT")


def test_pytest_finds_the_plugin():
    plugins = [entry.value for entry in metadata.distribution("marlinspike").entry_points if entry.group == "pytest11"]
    assert plugins == ["marlinspike.pytest_plugin"]
