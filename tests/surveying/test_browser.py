"""The page in a real browser."""

import dataclasses
import os
import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser found: install chromium, or say where it is in $CHROMIUM"
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(surveyed, tmp_path_factory):
    return surveyed.save(tmp_path_factory.mktemp("page") / "survey.html").as_uri()


@pytest.fixture(scope="module")
def opened(browser, address):
    """Opens the page, and lists what goes wrong in it and what it asks for."""
    troubles, contexts = [], []

    def new(width, scheme):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: troubles.append(f"script error: {error}"))
        tab.on("console", lambda said: troubles.append(f"console {said.type}: {said.text}"))
        tab.on(
            "request",
            lambda request: (
                request.url.startswith((address, "data:")) or troubles.append(f"asked for {request.url}")
            ),
        )
        tab.goto(address)
        tab.wait_for_function("document.querySelectorAll('.plot .main-svg').length > 0")
        return tab

    yield new, troubles
    for context in contexts:
        context.close()


@pytest.fixture
def open_page(opened):
    """Opens the page; afterwards nothing may have gone wrong in it, and nothing may have been asked for."""
    new, troubles = opened
    troubles.clear()
    yield lambda width=1280, scheme="light": new(width, scheme)
    assert troubles == []


@pytest.fixture(scope="module")
def _kept():
    return {}


@pytest.fixture
def look_at(open_page, _kept):
    """A page that tests only look at: it is drawn once in each scheme."""

    def look(scheme="light"):
        if scheme not in _kept:
            _kept[scheme] = open_page(scheme=scheme)
        return _kept[scheme]

    return look


def luminance(tab, script):
    """0 for black, 1 for white, of the first colour in what the script returns."""
    return tab.evaluate(
        f"(() => {{ const [r, g, b] = ({script}).match(/[\\d.]+/g).map(Number);"
        " return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255; })()"
    )


def test_every_finding_is_seen_and_every_figure_drawn(look_at, surveyed):
    tab = look_at()
    assert tab.locator("h1").inner_text() == surveyed.verdict
    articles = tab.locator("article.finding")
    assert articles.count() == len(surveyed.findings)
    for index, finding in enumerate(surveyed.ranked):
        assert articles.nth(index).locator(".sentence").is_visible()
        assert articles.nth(index).locator(".code").inner_text() == finding.code
    assert tab.locator(".plot:visible").count() == tab.locator(".plot:visible:has(.main-svg)").count() == 3
    points = tab.locator(".plot").first.locator(".scatterlayer .point")
    assert points.count() == 3  # three depths


def test_nothing_sticks_out_on_a_phone(open_page):
    tab = open_page(width=375)
    tab.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
    tab.wait_for_timeout(200)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 375
    sticking_out = tab.evaluate(
        "[...document.querySelectorAll('main *')].filter((one) => {"
        "  const box = one.getBoundingClientRect();"
        "  return box.width > 1 && box.right > 376 && !one.closest('svg, thead');"
        "}).map((one) => one.className || one.tagName)"
    )
    assert sticking_out == []


def test_a_wide_table_stays_within_its_finding_and_leaves_names_whole(browser, surveyed, tmp_path):
    """Headings and names wrap; a name only at its dots."""
    powers = [f"{what}{of}" for what in ("lr", "init", "lr × decay") for of in (" goes as", ", by the rule")]
    powers.append("multiplier goes as")
    row = {"tensor": "transformer.h.*.attn.c_attn.weight", "axis": "width", "role": "hidden", "rule": "adamw"}
    worst = surveyed.ranked[0]  # others may be folded away
    wide = dataclasses.replace(worst.evidence, rows=[row | dict.fromkeys(powers, -0.5)])
    findings = (dataclasses.replace(worst, evidence=wide),)
    page = dataclasses.replace(surveyed, findings=findings).save(tmp_path / "wide.html")
    tab = browser.new_page(viewport={"width": 1200, "height": 800})
    tab.goto(page.as_uri())
    article = tab.locator("article.finding:has(th:text-is('lr × decay goes as'))")
    right = "one => one.getBoundingClientRect().right"
    assert article.locator("table").evaluate(right) <= article.evaluate(right) + 1
    assert article.locator("td code").first.bounding_box()["height"] < 5 * 18  # four lines
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_scheme_is_honoured_by_page_and_figures(look_at, scheme):
    tab = look_at(scheme)
    paper = luminance(tab, "getComputedStyle(document.body).backgroundColor")
    ink = luminance(tab, "getComputedStyle(document.body).color")
    label = luminance(tab, "getComputedStyle(document.querySelector('.plot .xtick text')).fill")
    assert (
        (paper > 0.9, ink < 0.2, label < 0.45)
        if scheme == "light"
        else (paper < 0.15, ink > 0.8, label > 0.5)
    )
    assert abs(paper - label) > 0.4


def test_figures_follow_when_the_scheme_changes(open_page):
    tab = open_page(scheme="light")
    script = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    before = luminance(tab, script)
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_timeout(200)
    assert luminance(tab, script) > before + 0.2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(look_at, scheme):
    """4.5 to 1, as WCAG 2 asks of text, for every colour that text is set in."""
    tab = look_at(scheme)
    worst = tab.evaluate(
        """() => {
        const linear = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        const light = (css) => {
          const [r, g, b] = css.match(/[\\d.]+/g).map(Number).map(linear);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const paper = light(getComputedStyle(document.body).backgroundColor);
        const kinds = "p, td, th, dt, dd, li, h1, h2, h3, figcaption, .level, .code, .label, .extent, .page";
        const texts = [...document.querySelectorAll(kinds)];
        return Math.min(...texts.map((one) => {
          const ink = light(getComputedStyle(one).color);
          return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        }));
      }"""
    )
    assert worst >= 4.5


def test_on_paper_everything_is_open_light_and_uncut(open_page, surveyed):
    tab = open_page(scheme="dark")
    tab.emulate_media(media="print", color_scheme="dark")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    tab.wait_for_timeout(200)
    assert luminance(tab, "getComputedStyle(document.body).color") < 0.2
    assert luminance(tab, "getComputedStyle(document.querySelector('.plot .xtick text')).fill") < 0.45
    assert tab.locator("details:not([open])").count() == 0
    whys = tab.locator("article .why")
    assert whys.count() == len(surveyed.findings)
    assert all(whys.nth(index).is_visible() for index in range(whys.count()))
    assert set(
        tab.locator("article").evaluate_all("all => all.map((one) => getComputedStyle(one).breakInside)")
    ) == {"avoid"}
    assert tab.pdf(format="A4").startswith(b"%PDF")


def test_evidence_that_was_folded_away_is_drawn_when_opened(browser, surveyed, tmp_path):
    """A figure inside closed details may have no size yet."""
    calm = tuple(
        dataclasses.replace(finding, level="ok") if finding.code == "TH104" else finding
        for finding in surveyed.findings
    )
    path = dataclasses.replace(surveyed, findings=calm).save(tmp_path / "calm.html")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    article = tab.locator("article", has=tab.locator(".code", has_text="TH104"))
    assert not article.locator(".plot").first.is_visible()
    article.locator("summary").click()
    drawn = article.locator(".plot .main-svg").first
    drawn.wait_for(state="visible")
    assert 100 < drawn.bounding_box()["width"] <= article.locator(".panel").first.bounding_box()["width"] + 1
    tab.close()
