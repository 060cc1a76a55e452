"""gateway/callers/keys.py: the file of API keys."""

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.gateway.callers.keys import create_key, find_key, list_keys, parse_keys, revoke_keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_created_key_is_found(file: Path) -> None:
    key = create_key(file, "search", "ci")
    found = find_key(parse_keys(file.read_bytes()), key)
    assert found
    assert (found.tenant, found.name) == ("search", "ci")


def test_the_file_does_not_hold_the_key(file: Path) -> None:
    secret = create_key(file, "search", "ci").split("_", 2)[2]
    assert secret not in file.read_text()
    assert len(secret) >= 43  # 256 bits


def test_only_its_owner_may_read_a_new_file(file: Path) -> None:
    create_key(file, "search", "ci")
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_keeps_its_mode(file: Path) -> None:
    create_key(file, "search", "ci")
    file.chmod(0o640)
    create_key(file, "search", "ci")
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "change", [lambda key: key[:-1] + "!", lambda key: key[:-1], lambda key: "np_0123", lambda key: ""]
)
def test_another_key_is_not_found(file: Path, change: object) -> None:
    key = create_key(file, "search", "ci")
    assert callable(change)
    assert find_key(parse_keys(file.read_bytes()), change(key)) is None


def test_equal_secrets_have_different_hashes(file: Path) -> None:
    create_key(file, "a", "a")
    create_key(file, "a", "a")
    salts = {json.loads(line)["salt"] for line in file.read_text().splitlines()}
    assert len(salts) == 2


def test_a_broken_line_is_named_and_the_others_count(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = create_key(file, "a", "a"), create_key(file, "b", "b")
    lines = file.read_text().splitlines()
    content = "\n".join(["# ours", lines[0], "secret nonsense", "", lines[1], lines[0][:40]]).encode()
    with caplog.at_level(logging.WARNING):
        records = parse_keys(content)
    assert find_key(records, first)
    assert find_key(records, second)
    (logged,) = caplog.records
    assert logged.fields["lines"] == [3, 6]  # type: ignore[attr-defined]
    assert "nonsense" not in str(vars(logged))


def test_a_file_of_something_else_fills_no_log(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    create_key(file, "a", "a")
    assert parse_keys(b"x\n" * 1000 + file.read_bytes())
    assert caplog.records[0].fields["lines"] == list(range(1, 21))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda good: good[: len(good) // 2],
        lambda good: good.decode().encode("utf-16"),
        lambda good: bytes(len(good)),
        lambda good: b"# ours\n" + good[:40],
    ],
    ids=["half", "utf-16", "zeros", "half-below-a-comment"],
)
def test_a_file_without_a_readable_key_is_an_error(file: Path, spoil: Callable[[bytes], bytes]) -> None:
    create_key(file, "a", "a")
    with pytest.raises(SetupError, match=r"^--api-keys: no key can be read; line \d is the first that cannot$"):
        parse_keys(spoil(file.read_bytes()))


def test_a_key_that_is_revoked_through_a_link_is_gone_for_all(file: Path) -> None:
    key = create_key(file, "a", "a")
    link = file.parent / "other" / "link"
    link.parent.mkdir()
    link.symlink_to(file)
    revoke_keys(link, lambda record: True)
    assert not find_key(parse_keys(file.read_bytes()), key)
    assert link.is_symlink()


def test_a_line_with_an_unknown_field_is_broken(file: Path) -> None:
    create_key(file, "a", "a")
    record = json.loads(file.read_text()) | {"admin": True}
    kept = create_key(file, "b", "b")
    records = parse_keys(json.dumps(record).encode() + b"\n" + file.read_bytes().splitlines()[1])
    assert [key.tenant for key in records.values()] == ["b"]
    assert find_key(records, kept)


def test_a_missing_last_newline_costs_no_key(file: Path) -> None:
    first = create_key(file, "a", "a")
    file.write_text(file.read_text().rstrip("\n"))
    second = create_key(file, "b", "b")
    assert all(find_key(parse_keys(file.read_bytes()), key) for key in (first, second))


def test_a_revoked_key_is_gone_and_every_other_line_stays(file: Path) -> None:
    gone, kept = create_key(file, "a", "a"), create_key(file, "b", "b")
    file.write_text(f"# ours\n{file.read_text()}broken\n")
    revoked = revoke_keys(file, lambda key: key.tenant == "a")
    assert [key.tenant for key in revoked] == ["a"]
    records = parse_keys(file.read_bytes())
    assert find_key(records, kept)
    assert not find_key(records, gone)
    assert file.read_text().startswith("# ours\n")
    assert file.read_text().endswith("broken\n")


def test_a_revoked_last_key_leaves_a_file_without_keys_that_servers_accept(file: Path) -> None:
    create_key(file, "a", "a")
    file.write_text(f"# ours\n\n{file.read_text()}broken\n")
    assert len(revoke_keys(file, lambda key: True)) == 1
    assert parse_keys(file.read_bytes(), must_tell=True) == {}
    assert file.read_text().endswith("# ours\n# broken\n")
    key = create_key(file, "b", "b")
    assert find_key(parse_keys(file.read_bytes()), key)


def test_keys_made_at_once_are_all_there(file: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        keys = list(threads.map(lambda number: create_key(file, f"t{number}", "x"), range(20)))
    records = parse_keys(file.read_bytes())
    assert all(find_key(records, key) for key in keys)


def test_a_file_that_is_not_there_cannot_be_listed(file: Path) -> None:
    with pytest.raises(SetupError, match="No such file"):
        list_keys(file)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--api-keys .*No such file"):
        create_key(tmp_path / "missing" / "keys", "a", "a")


def test_a_name_must_not_be_empty(file: Path) -> None:
    with pytest.raises(SetupError, match="from 1 to 256 characters"):
        create_key(file, "", "x")
    assert not file.exists()


def test_a_name_does_not_change_the_terminal_that_lists_it(file: Path) -> None:
    with pytest.raises(SetupError, match="--name: must have from 1 to 256 characters that can be printed"):
        create_key(file, "a", "x\x1b[31m")


def test_a_key_expires_after_its_days(file: Path) -> None:
    key = create_key(file, "search", "ci", days=1 / 86_400)
    lasting = create_key(file, "search", "ci")
    (record, stays) = (find_key(parse_keys(file.read_bytes()), given) for given in (key, lasting))
    assert record
    assert stays
    until_s = time.monotonic() + 3
    while not record.has_expired and time.monotonic() < until_s:
        time.sleep(0.05)
    assert (record.has_expired, stays.has_expired) == (True, False)


@pytest.mark.parametrize("name", ["", ".", "..", "a\nb", "a" * 257])
def test_a_tenant_has_a_name_that_can_stand_in_paths_and_logs(file: Path, name: str) -> None:
    with pytest.raises(SetupError, match="--tenant"):
        create_key(file, name, "ci")
