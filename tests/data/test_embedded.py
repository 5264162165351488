"""The two embedded federations: what they claim to hold, and that their sites differ as they claim."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedfa.data.federation import ClientIndex, Federation, Split
from fedfa.data.sources.digit_sites import DigitSites
from fedfa.data.sources.drawing import SIDES, blur, deal, stream
from fedfa.data.sources.phantom_sites import PhantomSites

SPLITS: tuple[Split, ...] = ("train", "val", "test")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads save little on such small tensors, and wait for each other for seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def digits() -> Federation:
    pytest.importorskip("sklearn")
    return DigitSites().build(0)


@pytest.fixture(scope="module")
def phantoms() -> Federation:
    return PhantomSites().build(0)


def everything(client: ClientIndex) -> Tensor:
    return torch.cat([client.train, client.val, client.test])


def sizes(federation: Federation) -> dict[str, tuple[int, ...]]:
    return {name: tuple(len(client.of(split)) for split in SPLITS) for name, client in federation.clients.items()}


def same(one: Federation, other: Federation) -> bool:
    """Bit for bit, indices included."""
    index = (
        torch.equal(client.of(split), other.clients[name].of(split))
        for name, client in one.clients.items()
        for split in SPLITS
    )
    return torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels) and all(index)


def used_once(federation: Federation) -> bool:
    """Every sample of the pool is in exactly one split of exactly one client."""
    used = torch.cat([everything(client) for client in federation.clients.values()])
    return torch.equal(used.sort().values, torch.arange(len(federation.images)))


# What both share


def test_deal_gives_every_group_its_share_of_every_kind() -> None:
    kinds = torch.arange(200) % 4
    groups = deal(kinds, SIDES, stream(0, "test"))
    for kind in range(4):
        assert torch.bincount(groups[kinds == kind]).tolist() == [30, 10, 10]
    assert not torch.equal(groups, deal(kinds, SIDES, stream(1, "test")))


def test_streams_differ_by_seed_and_name() -> None:
    first = [torch.rand(4, generator=stream(*key)) for key in ((0, "a"), (0, "a"), (0, "b"), (1, "a"))]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2]) and not torch.equal(first[0], first[3])


def test_blur_keeps_a_constant_and_has_the_stated_width() -> None:
    assert torch.allclose(blur(torch.full((2, 3, 9, 9), 0.7), 1.5), torch.tensor(0.7))
    point = torch.zeros(1, 1, 41, 41)
    point[..., 20, 20] = 1
    profile = blur(point, 2.0)[0, 0].sum(0)
    variance = (profile * (torch.arange(41) - 20).square()).sum()
    assert variance.item() == pytest.approx(4.0, rel=0.05)  # the kernel ends at three standard deviations


@pytest.mark.parametrize("source", [DigitSites, PhantomSites])
def test_the_seed_decides_everything(source: type[DigitSites | PhantomSites]) -> None:
    if source is DigitSites:
        pytest.importorskip("sklearn")
    state = torch.get_rng_state()
    first = source(size=32).build(3)
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"
    assert same(first, source(size=32).build(3))
    other = source(size=32).build(4)
    assert not torch.equal(first.images, other.images)
    assert any(
        not torch.equal(a.train, b.train) for a, b in zip(first.clients.values(), other.clients.values(), strict=True)
    )
    assert same(first, source(size=32, split=3).build(4)), "a given split goes before the seed"


# digit-sites


def test_digits_are_all_there_once(digits: Federation) -> None:
    assert digits.name == "digit-sites" and digits.task == "classification" and len(digits.classes) == 10
    assert digits.images.shape == (1797, 3, 28, 28)
    assert used_once(digits)
    assert sizes(digits) == {
        "scanner": (431, 144, 144),
        "phone": (323, 108, 108),
        "tablet": (215, 72, 72),
        "fax": (108, 36, 36),
    }


def test_digits_keep_their_labels_and_their_strokes(digits: Federation) -> None:
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    assert torch.equal(digits.labels, torch.tensor(bunch.target, dtype=torch.int64))
    # Scanned ink, seen at 8×8 again, is the original image: pool and source are in the same order.
    scanned = everything(digits.clients["scanner"])
    inner = digits.images[scanned].float().mean(1, keepdim=True)[..., 2:26, 2:26]
    small = -F.avg_pool2d(inner, 3).flatten(1)
    original = torch.tensor(bunch.images, dtype=torch.float32)[scanned].flatten(1)
    correlation = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(small, original, strict=True)])
    assert correlation.min() > 0.8


def test_digit_classes_are_in_equal_shares_everywhere(digits: Federation) -> None:
    whole = torch.bincount(digits.labels) / len(digits.labels)
    for client in digits.clients.values():
        for split in SPLITS:
            share = torch.bincount(digits.labels[client.of(split)], minlength=10) / len(client.of(split))
            assert (share - whole).abs().max() < 0.04


def test_digit_sites_look_different(digits: Federation) -> None:
    """Any two sites are further apart in mean or spread of some channel than 0.1 of the range."""
    looks = []
    for client in digits.clients.values():
        pixels = digits.batch(everything(client))[0]
        looks.append(torch.cat([pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))]))
    for first in range(4):
        for second in range(first):
            assert (looks[first] - looks[second]).abs().max() > 0.1
    warm = looks[1]
    assert warm[0] - warm[2] > 0.15, "the phone's lamp is warm"
    assert looks[2].max() < 0.35, "the tablet's screen is dark"
    assert looks[0][:3].min() > 0.6, "the scanner's paper is white"


def features(federation: Federation, index: Tensor) -> tuple[Tensor, Tensor]:
    images, labels = federation.batch(index)
    return F.pad(F.avg_pool2d(images, 2).flatten(1), (0, 1), value=1.0), labels


def accuracy(federation: Federation, fitted_at: str, tried_at: str) -> float:
    """Of a ridge regression on the pixels, fitted to one client's training part and tried on a client's rest."""
    x, y = features(federation, federation.clients[fitted_at].train)
    weights = torch.linalg.solve(x.T @ x + 10 * torch.eye(x.shape[1]), x.T @ F.one_hot(y, 10).float())
    client = federation.clients[tried_at]
    x, y = features(federation, torch.cat([client.val, client.test]))
    right: float = ((x @ weights).argmax(1) == y).float().mean().item()
    return right


def test_a_model_of_one_digit_site_is_worse_at_another(digits: Federation) -> None:
    table = {(at, tried): accuracy(digits, at, tried) for at in digits.clients for tried in digits.clients}
    assert all(table[site, site] > 0.7 for site in digits.clients), "every site can be learned by itself"
    for other in ("scanner", "phone", "fax"):
        assert table["tablet", other] < 0.2 and table[other, "tablet"] < 0.2, "bright on dark, dark on bright"
    assert table["scanner", "phone"] < min(table["scanner", "scanner"], table["phone", "phone"]) - 0.15
    assert table["fax", "phone"] < min(table["fax", "fax"], table["phone", "phone"]) - 0.15


@pytest.mark.parametrize("size", [16, 29, 40])
def test_digits_come_in_any_size(size: int) -> None:
    pytest.importorskip("sklearn")
    assert DigitSites(size=size).build(0).images.shape == (1797, 3, size, size)


def test_digits_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="size is at least 16, not 8"):
        DigitSites(size=8)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"digit-sites needs scikit-learn: pip install 'fedfa\[demo\]'"):
        DigitSites().build(0)


# phantom-sites


def test_phantoms_are_what_they_say(phantoms: Federation) -> None:
    assert phantoms.name == "phantom-sites" and phantoms.task == "segmentation"
    assert phantoms.classes == ("background", "organ")
    assert phantoms.images.shape[1:] == (3, 64, 64) and 200 < len(phantoms.images) < 500
    assert phantoms.labels.dtype == torch.uint8 and phantoms.labels.unique().tolist() == [0, 1]
    assert used_once(phantoms)
    counts = [len(everything(client)) for client in phantoms.clients.values()]
    assert counts[0] > 2 * counts[3], "sites differ in size"


@pytest.mark.parametrize("size", [16, 64])
def test_every_slice_has_some_organ_and_more_background(size: int) -> None:
    filled = PhantomSites(size=size).build(1).labels.float().mean((1, 2))
    assert filled.min() > 0 and filled.max() < 0.2


@pytest.mark.parametrize("cases", [6, 7, 10])
def test_a_case_stands_on_one_side(cases: int) -> None:
    source = PhantomSites(size=16, cases=cases)
    federation, case = source.build(2), source.case_of_slice(2)
    assert len(case) == len(federation.images)
    seen = [set(case[client.of(split)].tolist()) for client in federation.clients.values() for split in SPLITS]
    assert all(seen), "no split is empty"
    assert sum(map(len, seen)) == len(set().union(*seen)) == len(case.unique())


def test_neighbouring_slices_are_the_channels(phantoms: Federation) -> None:
    case = PhantomSites().case_of_slice(0)
    images = phantoms.images
    pairs = [(a, b) for a, b in pairwise(range(len(case))) if case[a] == case[b]]
    assert len(pairs) > 200
    # Slice k and its upper neighbour, and slice k + 1 and its lower one, are the same two pictures.
    assert all(torch.equal(images[a, 1:], images[b, :2]) for a, b in pairs)


def dice(guess: Tensor, organ: Tensor) -> float:
    return (2 * (guess & organ).sum() / (guess.sum() + organ.sum())).item()


def test_brightness_alone_does_not_find_the_organ(phantoms: Federation) -> None:
    """Not even the best window of brightness, chosen at each site with the masks at hand."""
    levels = range(0, 257, 16)
    for client in phantoms.clients.values():
        index = everything(client)
        pixels, organ = phantoms.images[index, 1].int(), phantoms.labels[index].bool()
        windows = ((low, high) for low in levels for high in levels if low < high)
        assert max(dice((pixels >= low) & (pixels < high), organ) for low, high in windows) < 0.3


def test_the_organ_is_there_to_be_seen(phantoms: Federation) -> None:
    """A dark capsule: on average, the ring just outside the mask is darker than the organ's own rim."""
    grown = F.max_pool2d(phantoms.labels.float(), 3, 1, 1).bool()
    shrunk = F.max_pool2d(1 - phantoms.labels.float(), 3, 1, 1).bool()
    organ = phantoms.labels.bool()
    for client in phantoms.clients.values():
        index = everything(client)
        pixels = phantoms.images[index, 1].float()
        outside, rim = pixels[(grown & ~organ)[index]].mean(), pixels[(organ & shrunk)[index]].mean()
        assert outside < 0.97 * rim


def test_phantom_sites_look_different(phantoms: Federation) -> None:
    """Any two scanners are further apart in mean or spread of brightness than 0.04 of the range."""
    looks = []
    for client in phantoms.clients.values():
        pixels = phantoms.batch(everything(client))[0]
        looks.append(torch.stack([pixels.mean(), pixels.std()]))
    for first in range(4):
        for second in range(first):
            assert (looks[first] - looks[second]).abs().max() > 0.04


@pytest.mark.parametrize("size", [0, -16, 60])
def test_phantom_sizes_are_multiples_of_sixteen(size: int) -> None:
    with pytest.raises(ValueError, match=f"phantom-sites: size is a multiple of 16, not {size}"):
        PhantomSites(size=size)


def test_phantoms_need_enough_cases() -> None:
    with pytest.raises(ValueError, match="cases is at least 6"):
        PhantomSites(cases=5)
