"""core/addresses.py: what counts as the address of a unix socket, and which paths a socket can have."""

import pytest

from neuronpipe.core.addresses import unix_path


@pytest.mark.parametrize(
    ("address", "path"),
    [("unix:/run/a.sock", "/run/a.sock"), ("unix:///run/a.sock", "/run/a.sock"), ("unix:a.sock", "a.sock")],
)
def test_both_spellings_of_grpc_name_a_path(address: str, path: str) -> None:
    assert unix_path(address) == path


@pytest.mark.parametrize("address", ["127.0.0.1:50050", "[::1]:50050", "dns:///gateway:50050", "/run/a.sock", ""])
def test_other_addresses_have_no_path(address: str) -> None:
    assert unix_path(address) is None


def test_a_path_is_as_long_as_the_kernel_takes() -> None:
    # sun_path of unix(7): 108 bytes with the zero at its end. The path counts in bytes: é has two.
    assert unix_path(f"unix:/{'x' * 106}") == f"/{'x' * 106}"
    for path in (f"/{'x' * 107}", f"/{'é' * 53}x"):
        with pytest.raises(ValueError, match="has at most 107 bytes; this one has 108"):
            unix_path(f"unix:{path}")


def test_an_empty_path_is_an_error() -> None:
    with pytest.raises(ValueError, match="the path of the Unix socket is empty"):
        unix_path("unix:")
