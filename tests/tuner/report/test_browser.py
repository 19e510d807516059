"""The page in a real browser, without a window: nothing goes wrong, nothing is fetched, and a phone can show it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_databases import HOSTILE
from search_fakes import PROBLEM

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PHONE = {"width": 390, "height": 844}
NARROW_PHONE = {"width": 320, "height": 568}
DESKTOP = {"width": 1280, "height": 900}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, or whichever Playwright has installed."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install '.[browser]'")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with api.sync_playwright() as playwright:
        try:
            # Its sandbox needs what containers and root do not have; the page is ours, and is checked to fetch nothing.
            running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium: apt-get install chromium ({str(error).splitlines()[0]})")
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any, report: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """Opens a database's page; at the end nothing may have been complained about, and nothing fetched."""
    contexts, faults = [], []

    def open_report(database: str, *options: str, viewport: dict[str, int] = DESKTOP, **context: Any) -> Any:
        output = report(database, *options)
        contexts.append(browser.new_context(viewport=viewport, **context))
        page = contexts[-1].new_page()
        page.on("console", lambda message: faults.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: request.url == output.as_uri() or faults.append(f"fetched {request.url}"))
        page.goto(output.as_uri())
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert faults == []


def column(page: Any, number: int) -> list[str]:
    """The texts of a column of the first table of candidates that can be seen."""
    return page.locator(".trials tbody").first.locator(f"tr:visible td:nth-child({number})").all_inner_texts()


def one_problem(page: Any) -> Any:
    """The first section, with its table of candidates."""
    section = page.locator("section.problem").first
    section.locator("details.candidates").evaluate("details => { details.open = true; }")
    return section


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_opens_without_a_complaint(opened: Callable[..., Any], scheme: str) -> None:
    page = opened("searched", color_scheme=scheme)
    assert page.locator("section.problem").count() == 4
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("viewport", [NARROW_PHONE, PHONE, DESKTOP], ids=["narrow", "phone", "desktop"])
@pytest.mark.parametrize("kind", ["searched", "hostile"])
def test_no_page_scrolls_sideways(opened: Callable[..., Any], kind: str, viewport: dict[str, int]) -> None:
    page = opened(kind, viewport=viewport)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    reaching_out = page.evaluate(
        """width => Array.from(document.querySelectorAll("body *"))
            .filter((one) => !one.closest(".scroll") && one.getBoundingClientRect().right > width + 1)
            .map((one) => one.outerHTML.slice(0, 80))""",
        viewport["width"],
    )
    assert reaching_out == [], "a clipped text would not make the page wider"


def test_a_heading_sorts_by_its_column(opened: Callable[..., Any]) -> None:
    page = opened("searched")
    one_problem(page)
    heading = page.locator(".trials").first.get_by_role("button", name="ms", exact=True)
    before = column(page, 4)
    heading.click()
    times = [float(text) for text in column(page, 4) if text]
    assert times == sorted(times) != [float(text) for text in before if text]
    assert column(page, 4)[len(times) :] == [""] * (len(before) - len(times)), "what has no time comes last"
    sorted_headings = page.locator(".trials").first.locator("th[aria-sort=ascending]")
    assert sorted_headings.inner_text().startswith("ms")
    heading.click()
    assert [float(text) for text in column(page, 4) if text] == times[::-1]
    page.locator(".trials").first.get_by_role("button", name="configuration").press("Enter")
    assert len(column(page, 2)) == len(before), "a keyboard sorts, too, and loses nothing"


def test_words_and_choices_filter(opened: Callable[..., Any]) -> None:
    page = opened("searched")
    trials = one_problem(page).locator(".trials")
    everything = len(column(page, 2))
    trials.locator("[name=outcome]").select_option("refused")
    assert set(column(page, 3)) == {"refused"}
    trials.locator("[name=find]").fill("spilled 400 nothing-has-this")
    assert column(page, 3) == []
    assert trials.locator("output").inner_text() == f"0 of {everything}"
    trials.locator("[name=find]").fill("SPILLED 400")
    assert len(column(page, 3)) > 0
    trials.locator("[name=outcome]").select_option("")
    trials.locator("[name=find]").fill("")
    trials.locator("[name=family]").select_option("wgmma")
    assert 0 < len(column(page, 3)) < everything


def test_a_phone_sorts_by_a_choice(opened: Callable[..., Any]) -> None:
    page = opened("searched", viewport=PHONE)
    trials = one_problem(page).locator(".trials")
    trials.locator("[name=sort]").select_option("ms")
    times = [float(text) for text in column(page, 4) if text]
    assert times == sorted(times)
    assert trials.locator("thead th").first.evaluate("one => one.getBoundingClientRect().width") <= 1


def test_a_point_says_what_it_is_and_finds_its_row(opened: Callable[..., Any]) -> None:
    page = opened("searched")
    section = page.locator("section.problem").first
    point = section.locator(".plot .mark.failed").first
    point.locator(".reach").hover(force=True)
    text = section.locator("figcaption").first.inner_text()
    assert text == point.locator("title").text_content()
    point.locator(".reach").click(force=True)
    row = section.locator("tr.pointed-at")
    assert row.is_visible(), "the table is opened"
    assert row.get_attribute("data-outcome") == "failed"
    assert text.startswith(row.locator("td").first.inner_text() + ": ")


def test_hostile_texts_do_nothing(opened: Callable[..., Any]) -> None:
    page = opened("hostile", "--shape", PROBLEM.shape, "--causal")
    body = page.locator("body").text_content()
    assert HOSTILE in body
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    page.locator(".trials").locator("[name=find]").fill("<script>alert(")
    assert len(column(page, 3)) > 0
    point = page.locator(".plot .mark.failed .reach").first
    point.hover(force=True)
    assert HOSTILE in page.locator("figcaption").first.inner_text()


def test_the_page_works_without_its_script(opened: Callable[..., Any]) -> None:
    page = opened("searched", "--shape", PROBLEM.shape, "--causal", java_script_enabled=False)
    page.locator("summary").last.click()
    assert page.locator("tbody tr:visible").count() > 30
